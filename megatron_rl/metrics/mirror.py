"""What the mirrors of metrics.jsonl share: which values of a row they show, and how."""

from __future__ import annotations

from typing import Any

PREFIX = {"step": "train", "eval": "eval"}
"""Kind of a row -> prefix of its names in a mirror."""

NOT_SHOWN = frozenset({"kind", "step", "unix_seconds", "nonfinite"})


class MirrorError(RuntimeError):
    """A mirror that was asked for cannot start; the message names the option and the remedy."""


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row and of its tasks; text, null, lists and other mappings are left out.

    Example: `scalars({"kind": "step", "loss": 0.5, "ids": [1], "tasks": {"maths": {"x": 2}}})` is
    `{"loss": 0.5, "tasks/maths/x": 2.0}`.
    """
    found = {
        name: float(value)
        for name, value in row.items()
        if name not in NOT_SHOWN and isinstance(value, int | float)
    }
    for task, measured in (row.get("tasks") or {}).items():
        found |= {f"tasks/{task}/{name}": value for name, value in scalars(measured).items()}
    return found


def histogram(value: Any) -> list[tuple[float, float]] | None:
    """The bins `(integer x, count)` of a mapping without gaps between them, or None.

    Example: `histogram({"1": 5, "3": 2})` is `[(1, 5), (2, 0), (3, 2)]`.
    """
    if not isinstance(value, dict) or not value:
        return None
    try:
        counts = {int(x): float(n) for x, n in value.items()}
    except (TypeError, ValueError):
        return None
    return [(float(x), counts.get(x, 0.0)) for x in range(min(counts), max(counts) + 1)]
