"""Aggregation: all means of the loss, as one weight per token.

The trainer computes `sum(loss_weight * term)` without further division, so a gradient cannot depend
on micro-batches, data parallelism or packing.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray


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
    counted = [c for c in token_counts if c.sum()]
    if not counted:
        return [np.zeros(len(c)) for c in token_counts]
    samples = sum(int((c > 0).sum()) for c in counted)
    tokens = sum(int(c.sum()) for c in counted)

    def divisor(c: NDArray[np.int64]) -> NDArray[np.int64] | int:
        if aggregation == "prompt":
            return len(counted) * max(int(c.sum()), 1)
        if aggregation == "constant":
            assert constant_length_tokens is not None
            return samples * constant_length_tokens
        return samples * np.maximum(c, 1) if aggregation == "sample" else tokens

    return [np.where(c > 0, 1.0 / divisor(c), 0.0) for c in token_counts]
