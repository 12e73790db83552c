"""Advantages of completions from their rewards."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

EPS = 1e-6
Baseline = Literal["mean", "leave_one_out"]
Rewards = NDArray[np.float64]
Returns = tuple[float, ...]
"""Rewards of a rollout from each of its turns on, or one for the whole."""


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


def turn_returns(reward: float, turn_rewards: Sequence[float], turns: int) -> Returns:
    """Return what of a rollout's reward comes at each turn or later.

    Example: a reward of 3.5 with 1.0 and 2.0 for the first two of three turns: (3.5, 2.5, 0.5).
    """
    before = accumulate([0.0, *(turn_rewards or [0.0] * turns)][:turns])
    return tuple(reward - earlier for earlier in before)


def by_turn(returns: Sequence[Returns]) -> list[Rewards]:
    """Return an array for each turn's number, of the rollouts of a group that have this turn."""
    longest = max(map(len, returns), default=0)
    return [np.array([r[turn] for r in returns if turn < len(r)]) for turn in range(longest)]


def turn_advantages(
    returns: list[list[Returns]],
    normalization: Literal["batch", "prompt", "none"],
    *,
    baseline: Baseline = "mean",
    others: Sequence[list[Returns]] = (),
) -> list[list[Returns]]:
    """Return an advantage for each return, by `advantages` over its turn's number in its group.

    Args:
        returns: those of the rollouts of each trained group, as in the result.
        normalization: as for `advantages`.
        baseline: as for `advantages`.
        others: returns of untrained groups that count in the batch's standard deviation.
    """
    flat = iter(
        advantages(
            [turn for group in returns for turn in by_turn(group)],
            normalization,
            baseline=baseline,
            others=[turn for group in others for turn in by_turn(group)],
        )
    )
    result = []
    for group in returns:
        turns = [iter(next(flat).tolist()) for _ in range(max(map(len, group), default=0))]
        result.append([tuple(next(turn) for turn in turns[: len(r)]) for r in group])
    return result


def _centered(rewards: Rewards, baseline: Baseline) -> Rewards:
    centered = rewards - rewards.mean()
    if baseline == "leave_one_out" and len(rewards) > 1:
        return centered * (len(rewards) / (len(rewards) - 1))
    return centered
