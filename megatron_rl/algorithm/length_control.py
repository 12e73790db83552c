"""The two ways to bound the length of completions: thinking budgets and a length penalty."""

import random

import numpy as np
from numpy.typing import NDArray


def thinking_budgets(seed: int, group: int, count: int, bounds: tuple[int, int]) -> list[int]:
    """Draw the thinking budget [tokens] of each completion of a group, uniform in `bounds`.

    Both bounds are included; ScaleRL interrupts thinking in [10k, 12k]. The draw depends on seed
    and group only, so a group that is generated again after a resume has the same budgets.
    """
    rng = random.Random(f"thinking budget {seed} {group}")
    return [rng.randint(*bounds) for _ in range(count)]


def length_penalty(
    lengths: NDArray[np.int64], max_tokens: int, cache_tokens: int
) -> NDArray[np.float64]:
    """Return clip((max - length) / cache - 1, -1, 0) of each completion.

    It is 0 up to `max - cache` tokens and falls to -1 at `max`: ScaleRL's length penalty (applied
    to correct completions) and DAPO's soft overlong punishment (applied to all).

    Example: ScaleRL's max 14,336 and cache 2,048 (A.10) give 0 up to 12,288 tokens, -.35 at 13,000
    and -1 from 14,336 on.
    """
    return np.clip((max_tokens - lengths) / cache_tokens - 1.0, -1.0, 0.0)
