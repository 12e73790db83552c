"""Advantages of completions from their rewards."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

EPS = 1e-6
Baseline = Literal["mean", "leave_one_out"]
Rewards = NDArray[np.float64]


def advantages(
    rewards: list[Rewards],
    normalization: Literal["batch", "prompt", "none"],
    *,
    baseline: Baseline = "mean",
    others: Sequence[Rewards] = (),
) -> list[Rewards]:
    """Center the rewards of each group and divide them by a standard deviation.

    `A_i = r_i - mean_j r_j`; for `batch`, `Ahat_i = A_i / std(all A_i in the batch)` (ScaleRL); for
    `prompt`, the divisor is the group's own standard deviation (GRPO). With `leave_one_out` the
    mean is over the other completions of the group (RLOO), which scales A_i by n / (n - 1).

    Args:
        rewards: one array per trained group, as in the result; groups may differ in size.
        normalization: `batch` or `prompt` standard deviation, or `none`.
        baseline: mean of the group, or of the other completions in it.
        others: rewards of untrained groups that count in the batch's standard deviation.

    Example: groups [1, -1] and [1, 1, 1, -1] are centered to [1, -1] and [.5, .5, .5, -1.5], whose
    mean square is 5 / 6, so `batch` divides by sqrt(5 / 6).
    """
    centered = [_centered(r, baseline) for r in rewards]
    if normalization == "none" or not centered:
        return centered
    if normalization == "prompt":
        return [a / (a.std() + EPS) for a in centered]
    every = np.concatenate([*centered, *(_centered(r, baseline) for r in others)])
    return [a / (every.std() + EPS) for a in centered]


def _centered(rewards: Rewards, baseline: Baseline) -> Rewards:
    centered = rewards - rewards.mean()
    if baseline == "leave_one_out" and len(rewards) > 1:
        return centered * (len(rewards) / (len(rewards) - 1))
    return centered
