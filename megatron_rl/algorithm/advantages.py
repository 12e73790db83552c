"""Advantages of completions from their rewards."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

EPS = 1e-6


def advantages(
    rewards: list[NDArray[np.float64]], normalization: Literal["batch", "prompt", "none"]
) -> list[NDArray[np.float64]]:
    """Centred rewards of each group, divided by a standard deviation.

    `A_i = r_i - mean_j r_j`; for `batch`, `Ahat_i = A_i / std(all A_i in the batch)` (ScaleRL); for
    `prompt`, the divisor is the group's own standard deviation (GRPO).

    Args:
        rewards: one array per group that is trained, groups may differ in size.
        normalization: which standard deviation divides.

    Returns:
        One array per group.

    Example: groups [1, -1] and [1, 1, 1, -1] are centred to [1, -1] and [.5, .5, .5, -1.5], whose
    mean square is 5 / 6, so `batch` divides by sqrt(5 / 6).
    """
    centred = [r - r.mean() for r in rewards]
    if normalization == "none" or not centred:
        return centred
    if normalization == "prompt":
        return [a / (a.std() + EPS) for a in centred]
    return [a / (np.concatenate(centred).std() + EPS) for a in centred]
