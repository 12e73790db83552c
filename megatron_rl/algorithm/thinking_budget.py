"""Forced-length interruption: when thinking is cut, by a budget drawn per completion."""

from __future__ import annotations

import random


def thinking_budgets(seed: int, group: int, count: int, bounds: tuple[int, int]) -> list[int]:
    """Thinking tokens of each completion of a group, uniform in `bounds` (both included).

    ScaleRL draws the position in [10k, 12k]. The draw depends on seed and group alone, so a group
    that is generated again after a resume has the same budgets.
    """
    rng = random.Random(f"thinking budget {seed} {group}")
    return [rng.randint(*bounds) for _ in range(count)]
