"""JSON lines: a run's metrics.jsonl as it is, or any file with one flat or nested object per line.

``megatron_rl.metrics/1`` (named by the first line): only rows of kind "eval" count; of several with
one step (a resumed run writes them again) the last; a torn last line, left by a kill, is ignored.
Nested keys become dotted columns: ``{"tasks": {"math": {"pass_rate": 0.5}}}`` is the column
``tasks.math.pass_rate``.
"""

import json
from pathlib import Path
from typing import Any

from ..errors import DataError
from .table import Table

SCHEMA = "megatron_rl.metrics/"


def read(path: Path) -> Table:
    """Read the objects of a file; a key that a row does not have is None there."""
    raw = path.read_bytes().splitlines()
    rows: list[tuple[int, dict[str, Any]]] = []
    repairs: list[str] = []
    for number, line in enumerate(raw, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if number == len(raw) and rows:
                repairs.append(f"line {number} is torn and was left out")
                break
            raise DataError(
                f"not JSON ({error})", "Mend or remove the line", file=str(path), line=number
            ) from None
        if not isinstance(row, dict):
            raise DataError(
                f"a {type(row).__name__}, not an object",
                "Write one object per line",
                file=str(path),
                line=number,
            )
        rows.append((number, row))
    if not rows:
        raise DataError("the file is empty", "Give one object per line", file=str(path))
    schema = str(rows[0][1].get("schema", ""))
    name = path.stem
    if schema.startswith(SCHEMA):
        rows, note = _evaluations(path, rows, schema)
        repairs += note
        name = path.resolve().parent.name if path.stem == "metrics" else path.stem
    flat = [(number, _flatten(row)) for number, row in rows]
    names = list(dict.fromkeys(key for _, row in flat for key in row))
    columns: dict[str, list[object]] = {n: [row.get(n) for _, row in flat] for n in names}
    return Table(str(path), name, columns, [number for number, _ in flat], tuple(repairs))


def _evaluations(
    path: Path, rows: list[tuple[int, dict[str, Any]]], schema: str
) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    if schema != SCHEMA + "1":
        raise DataError(
            f"schema {schema} is newer than {SCHEMA}1", "Update megatron_rl", file=str(path), line=1
        )
    found = [(n, row) for n, row in rows if row.get("kind") == "eval"]
    if not found:
        raise DataError(
            "no evaluation rows (kind 'eval')",
            "Run with evaluations switched on, or wait for the first one",
            file=str(path),
        )
    by_step = {row.get("step", n): (n, row) for n, row in found}
    repeated = len(found) - len(by_step)
    note = [f"{repeated} evaluations written again after a resume: the last counts"]
    return sorted(by_step.values(), key=lambda pair: pair[0]), note if repeated else []


def _flatten(row: dict[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
