"""Advantages of completions from their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

EPS = 1e-6

Normalization = Literal["batch", "prompt", "none"]
Baseline = Literal["mean", "leave_one_out"]
Rewards = NDArray[np.float64]


def advantages(
    rewards: list[Rewards],
    normalization: Normalization,
    *,
    baseline: Baseline = "mean",
    others: Sequence[Rewards] = (),
) -> list[Rewards]:
    """Centred rewards of each group, divided by a standard deviation.

    `A_i = r_i - mean_j r_j`; for `batch`, `Ahat_i = A_i / std(all A_i in the batch)` (ScaleRL); for
    `prompt`, the divisor is the group's own standard deviation (GRPO). With `leave_one_out` the
    mean is over the other completions of the group (RLOO), which scales A_i by n / (n - 1).

    Args:
        rewards: one array per group that is trained, groups may differ in size.
        normalization: which standard deviation divides.
        baseline: what is subtracted.
        others: rewards of groups that are not trained and count in the batch's standard deviation.

    Returns:
        One array per trained group.

    Example: groups [1, -1] and [1, 1, 1, -1] are centred to [1, -1] and [.5, .5, .5, -1.5], whose
    mean square is 5 / 6, so `batch` divides by sqrt(5 / 6).
    """
    centred = [_centred(r, baseline) for r in rewards]
    if normalization == "none" or not centred:
        return centred
    if normalization == "prompt":
        return [a / (a.std() + EPS) for a in centred]
    every = np.concatenate([*centred, *(_centred(r, baseline) for r in others)])
    return [a / (every.std() + EPS) for a in centred]


def _centred(rewards: Rewards, baseline: Baseline) -> Rewards:
    centred = rewards - rewards.mean()
    if baseline == "leave_one_out" and len(rewards) > 1:
        return centred * (len(rewards) / (len(rewards) - 1))
    return centred
