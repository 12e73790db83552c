"""MiniRL: REINFORCE with a truncated importance weight, and PPO's clip as a mask.

    L = sum_t  -w_t * M_t * sg(min(rho_t, cap)) * A_t * log pi(y_t)
    rho_t = pi(y_t) / pi_gen(y_t),    r_t = pi(y_t) / pi_old(y_t)
    M_t = 0 where (A_t > 0 and r_t > high) or (A_t < 0 and r_t < low), else 1

(arXiv 2512.01374.) The weight corrects for everything between the generator and the trained policy;
the mask depends on staleness only, by the ratio to the trainer's old policy.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from megatron_rl.algorithm.losses.base import Loss, LossTerms, RatioReference, Tokens, ratio_of


class MiniRl(Loss):
    """MiniRL, a truncated importance weight, and a mask by the ratio to the old policy."""

    ratio_reference: ClassVar[RatioReference] = "old"
    kind: Literal["mini_rl"] = "mini_rl"
    """Policy loss."""
    min_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Lower bound of pi / pi_old for negative advantages (1 - eps_low)."""
    max_ratio: Annotated[float, Field(ge=1.0)] = 1.27
    """Upper bound of pi / pi_old for positive advantages (1 + eps_high)."""
    max_weight_ratio: PositiveFloat = 5.0
    """Cap on the importance weight pi / pi_gen."""

    def terms(self, tokens: Tokens) -> LossTerms:
        """Return the terms; A > 0 and pi / pi_old = 1.3 > 1.27 give no gradient."""
        now_T = tokens.logprobs_T.detach()
        weight_T = ratio_of(now_T, tokens.generator_logprobs_T).clamp(max=self.max_weight_ratio)
        stale_T = ratio_of(now_T, tokens.old_logprobs_T)
        over_T = (tokens.advantages_T > 0) & (stale_T > self.max_ratio)
        clipped_T = over_T | (tokens.advantages_T < 0) & (stale_T < self.min_ratio)
        kept_T = weight_T.masked_fill(clipped_T, 0.0)
        return LossTerms(-kept_T * tokens.advantages_T * tokens.logprobs_T, clipped_T)
