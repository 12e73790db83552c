"""REINFORCE: no ratio of its own.

    L = sum_t  -w_t * A_t * log pi(y_t)

With `algorithm.correction` it is REINFORCE with truncated importance sampling (TIS): the factor
f(pi / pi_gen) is detached, so that `token_truncation` at a cap is CISPO at that cap.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from megatron_rl.algorithm.losses.base import Against, Loss, Terms, Tokens


class Reinforce(Loss):
    """REINFORCE, with or without an importance correction."""

    against: ClassVar[Against] = "none"
    kind: Literal["reinforce"] = "reinforce"
    """Policy loss."""

    def terms(self, tokens: Tokens) -> Terms:
        """Example: logp = -1, A = 2: loss 2, dL/dlogp = -2."""
        return Terms(
            -tokens.advantages_T * tokens.logprobs_T, tokens.loss_weights_T.new_zeros(()).bool()
        )
