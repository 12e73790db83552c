"""PPO's clipped surrogate: GRPO (symmetric), DAPO (asymmetric), and dual clip.

    L = sum_t  -w_t * min(r_t A_t, clip(r_t, low, high) A_t),    r_t = pi(y_t) / pi_old(y_t)

(PPO, arXiv 1707.06347, equation 7; in ScaleRL's comparison, equations 7 and 8 of appendix A.2,
pi_old is the generator.) A token has no gradient where A > 0 and r > high, or A < 0 and r < low.
Dual clip (arXiv 1912.09729): where A < 0 the surrogate is bounded below by c A, and a token with
r > c has no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from megatron_rl.algorithm.losses.base import Loss, LossTerms, RatioReference, Tokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor


class PpoClip(Loss):
    """PPO's clipped surrogate (GRPO, DAPO)."""

    ratio_reference: ClassVar[RatioReference] = "old"
    kind: Literal["ppo_clip"] = "ppo_clip"
    """Policy loss."""
    min_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Lower bound of pi / pi_old in ratio units (1 - the papers' eps_low)."""
    max_ratio: Annotated[float, Field(ge=1.0)] = 1.2
    """Upper bound of pi / pi_old in ratio units (1 + the papers' eps_high)."""
    dual_clip_ratio: PositiveFloat | None = None
    """Bound c of the ratio where the advantage is negative; above `max_ratio`, usually 3."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.dual_clip_ratio is not None and self.dual_clip_ratio <= self.max_ratio:
            raise ValueError(
                f"algorithm.loss.dual_clip_ratio is {self.dual_clip_ratio:g}: it must exceed"
                f" algorithm.loss.max_ratio = {self.max_ratio:g}"
            )
        return self

    def terms(self, tokens: Tokens) -> LossTerms:
        """Return the terms; r = 1.5, high = 1.2: loss -2.4 for A = 2, 3 for A = -2."""
        ratio_T = ratio_of(tokens.logprobs_T, tokens.old_logprobs_T)
        return clipped_surrogate(
            ratio_T, tokens.advantages_T, self.min_ratio, self.max_ratio, self.dual_clip_ratio
        )


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, low: float, high: float, dual_clip: float | None = None
) -> LossTerms:
    """Return -min(r A, clip(r) A) [T], bounded by -c A for negative advantages."""
    bounded_T = ratio_T.clamp(low, high) * advantages_T
    surrogate_T = (ratio_T * advantages_T).minimum(bounded_T)
    positive_T, negative_T = advantages_T > 0, advantages_T < 0
    clipped_T = (positive_T & (ratio_T > high)) | (negative_T & (ratio_T < low))
    if dual_clip is not None:
        floor_T = advantages_T * dual_clip
        surrogate_T = surrogate_T.maximum(floor_T).where(negative_T, surrogate_T)
        clipped_T = clipped_T | (negative_T & (ratio_T > dual_clip))
    return LossTerms(-surrogate_T, clipped_T)
