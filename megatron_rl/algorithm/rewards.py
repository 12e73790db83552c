"""Length penalties on verified rewards."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def length_penalty(
    lengths: NDArray[np.int64], max_tokens: int, cache_tokens: int
) -> NDArray[np.float64]:
    """clip((max - length) / cache - 1, -1, 0) of each completion.

    0 up to `max - cache` tokens, falling to -1 at `max`: ScaleRL's length penalty (there for right
    completions) and DAPO's soft over-long punishment (there for all) are this one line.

    Example: max 100, cache 20: 80 tokens 0, 90 tokens -.5, 100 tokens and more -1.
    """
    return np.clip((max_tokens - lengths) / cache_tokens - 1.0, -1.0, 0.0)
