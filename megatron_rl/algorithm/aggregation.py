"""Aggregation: one weight per token carries every mean of the loss.

The trainer computes `sum(loss_weight * term)` and divides by nothing, so a gradient cannot depend
on micro-batches, data parallelism or packing.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Aggregation = Literal["prompt", "sample", "token", "constant"]


def token_weights(
    token_counts: list[NDArray[np.int64]],
    aggregation: Aggregation,
    constant_length_tokens: int | None = None,
) -> list[NDArray[np.float64]]:
    """Loss weight of a token in each completion of each group.

    Args:
        token_counts: trained (sampled, not forced) tokens of each completion, one array per group
            that is trained; a completion with 0 tokens gets weight 0.
        aggregation: `prompt`: mean over a group's tokens, then over groups (ScaleRL, DAPO);
            `sample`: mean over a completion's tokens, then over all completions (GRPO);
            `token`: mean over all tokens; `constant`: sum over a completion's tokens by a constant
            length, then mean over all completions (Dr. GRPO).
        constant_length_tokens: of `constant`.

    Returns:
        One array per group; `sum(weight * tokens)` over everything is 1, or 0 for no tokens; for
        `constant` it is the mean length by the constant one.

    Example: groups [1, 3] and [2, 2] under `prompt` weigh [1/8, 1/8] and [1/8, 1/8].
    """
    counted = [c for c in token_counts if c.sum()]
    if not counted:
        return [np.zeros(len(c)) for c in token_counts]
    samples = sum(int((c > 0).sum()) for c in counted)
    tokens = sum(int(c.sum()) for c in counted)

    def weights(c: NDArray[np.int64]) -> NDArray[np.float64]:
        if not c.sum():
            return np.zeros(len(c))
        if aggregation == "prompt":
            return np.where(c > 0, 1.0 / (len(counted) * c.sum()), 0.0)
        if aggregation == "constant":
            assert constant_length_tokens is not None
            return np.where(c > 0, 1.0 / (samples * constant_length_tokens), 0.0)
        if aggregation == "sample":
            return np.where(c > 0, 1.0 / (samples * np.maximum(c, 1)), 0.0)
        return np.where(c > 0, 1.0 / tokens, 0.0)

    return [weights(c) for c in token_counts]
