"""From rewards and lengths to advantages and loss weights, and the bounds of lengths.

The loss weights carry all means of the loss: the trainer computes `sum(loss_weight * term)` without
further division, so a gradient cannot depend on micro-batches, data parallelism or packing.
"""

import random
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Literal

import numpy as np
from numpy.typing import NDArray

EPS = 1e-6
Baseline = Literal["mean", "leave_one_out"]
Normalization = Literal["batch", "prompt", "none"]
Rewards = NDArray[np.float64]
Returns = tuple[float, ...]  # rewards of a rollout from each of its turns on, or one for the whole


def advantages(
    rewards: list[Rewards],
    normalization: Normalization,
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
    columns = zip_longest(*returns)
    return [np.array([value for value in turn if value is not None]) for turn in columns]


def turn_advantages(
    returns: list[list[Returns]],
    normalization: Normalization,
    *,
    baseline: Baseline = "mean",
    others: Sequence[list[Returns]] = (),
) -> list[list[Returns]]:
    """Return an advantage for each return, by `advantages` over its turn's number in its group.

    The arguments are those of `advantages`, with returns of the rollouts of each group.
    """
    columns = [by_turn(group) for group in returns]
    trained = [turn for group in columns for turn in group]
    more = [turn for group in others for turn in by_turn(group)]
    flat = iter(advantages(trained, normalization, baseline=baseline, others=more))
    result = []
    for group, own in zip(returns, columns, strict=True):
        turns = [iter(next(flat).tolist()) for _ in own]
        result.append([tuple(next(turn) for turn in turns[: len(r)]) for r in group])
    return result


def _centered(rewards: Rewards, baseline: Baseline) -> Rewards:
    centered = rewards - rewards.mean()
    if baseline == "leave_one_out" and len(rewards) > 1:
        return centered * (len(rewards) / (len(rewards) - 1))
    return centered


def token_weights(
    token_counts: list[NDArray[np.int64]],
    aggregation: Literal["prompt", "sample", "token", "constant"],
    constant_length_tokens: int | None = None,
) -> list[NDArray[np.float64]]:
    """Return the loss weight of a token in each completion of each group.

    Args:
        token_counts: trained (sampled, not forced) tokens of each completion, one array per trained
            group; a completion with 0 tokens gets weight 0.
        aggregation: `prompt`: mean over a group's tokens, then over groups (ScaleRL, DAPO);
            `sample`: mean over a completion's tokens, then over all completions (GRPO);
            `token`: mean over all tokens; `constant`: sum over a completion's tokens divided by a
            constant length, then mean over all completions (Dr. GRPO).
        constant_length_tokens: for `constant`.

    Returns:
        One array per group; `sum(weight * tokens)` is 1 (0 without tokens), except for `constant`.

    Example: groups [1, 3] and [2, 2] under `prompt` weigh [1/8, 1/8] and [1/8, 1/8].
    """
    groups = sum(bool(c.sum()) for c in token_counts)
    samples = sum(int((c > 0).sum()) for c in token_counts)
    tokens = sum(int(c.sum()) for c in token_counts)

    def weight(c: NDArray[np.int64]) -> NDArray[np.float64] | float:
        if aggregation == "prompt":
            return 1.0 / (groups * int(c.sum()))
        if aggregation == "constant":
            assert constant_length_tokens is not None
            return 1.0 / (samples * constant_length_tokens)
        return 1.0 / (samples * np.maximum(c, 1)) if aggregation == "sample" else 1.0 / tokens

    return [np.where(c > 0, weight(c) if c.any() else 0.0, 0.0) for c in token_counts]


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


def thinking_budgets(seed: int, group: int, count: int, bounds: tuple[int, int]) -> list[int]:
    """Draw the thinking budget [tokens] of each completion of a group, uniform in `bounds`.

    Both bounds are included; ScaleRL interrupts thinking in [10k, 12k]. The draw depends on seed
    and group only, so a group that is generated again after a resume has the same budgets.
    """
    rng = random.Random(f"thinking budget {seed} {group}")
    return [rng.randint(*bounds) for _ in range(count)]
