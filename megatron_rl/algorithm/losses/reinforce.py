"""REINFORCE, which has no ratio.

    L = sum_t  -w_t * A_t * log pi(y_t)

With `algorithm.correction` it is REINFORCE with truncated importance sampling (TIS). The factor
f(pi / pi_gen) is detached, so `token_truncation` with a cap equals CISPO with that cap.
"""

from typing import ClassVar, Literal

from megatron_rl.algorithm.losses.base import Loss, LossTerms, RatioReference, Tokens


class Reinforce(Loss):
    """REINFORCE, with or without an importance correction."""

    ratio_reference: ClassVar[RatioReference] = "none"
    kind: Literal["reinforce"] = "reinforce"
    """Policy loss."""

    def terms(self, tokens: Tokens) -> LossTerms:
        """Return the terms; logp = -1 and A = 2 give loss 2 and dL/dlogp = -2."""
        clipped_T = tokens.loss_weights_T.new_zeros(()).bool()
        return LossTerms(-tokens.advantages_T * tokens.logprobs_T, clipped_T)
