"""DPPO: a mask by the change of a token's probability, not of its ratio.

    L = sum_t  -w_t * M_t * sg(rho_t) * A_t * log pi(y_t),    rho_t = pi(y_t) / pi_gen(y_t)
    M_t = 0 where D_t > delta and (A_t > 0, rho_t > 1  or  A_t < 0, rho_t < 1), else 1

(arXiv 2602.04879.) D is the divergence of the two-outcome distributions (this token, any other):
total variation |pi - pi_gen|, or KL(pi_gen || pi). Tokens that move back towards the generator's
policy are never masked. The gradient is that of the paper's rho A.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from megatron_rl.algorithm.losses.base import Loss, LossTerms, RatioReference, Tokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor

TINY = 1e-8  # lower bound of the probability of all other tokens: its logarithm must be finite


class Dppo(Loss):
    """DPPO, a mask by the divergence from the generator's policy."""

    ratio_reference: ClassVar[RatioReference] = "generator"
    kind: Literal["dppo"] = "dppo"
    """Policy loss."""
    divergence: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """Total variation or KL of (this token, any other)."""
    max_divergence: PositiveFloat = 0.15
    """Mask tokens above this divergence (delta): 0.15 for binary_tv, 0.05 for binary_kl."""
    max_ratio: Annotated[float, Field(ge=1.0)] | None = None
    """Cap on pi_train / pi_gen of unmasked tokens; none by default."""

    def terms(self, tokens: Tokens) -> LossTerms:
        """Return the terms; pi .6 and pi_gen .4 (TV .2 > .15) mask a token with A > 0."""
        now_T = tokens.logprobs_T.detach()
        ratio_T = ratio_of(now_T, tokens.generator_logprobs_T)
        positive_T, negative_T = tokens.advantages_T > 0, tokens.advantages_T < 0
        away_T = (positive_T & (ratio_T > 1)) | (negative_T & (ratio_T < 1))
        divergence_T = self._divergence(now_T, tokens.generator_logprobs_T)
        clipped_T = away_T & (divergence_T > self.max_divergence)
        weight_T = ratio_T if self.max_ratio is None else ratio_T.clamp(max=self.max_ratio)
        kept_T = weight_T.masked_fill(clipped_T, 0.0)
        return LossTerms(-kept_T * tokens.advantages_T * tokens.logprobs_T, clipped_T)

    def _divergence(self, now_T: Tensor, generator_T: Tensor) -> Tensor:
        p_T, q_T = now_T.exp(), generator_T.exp()
        if self.divergence == "binary_tv":
            return (p_T - q_T).abs()
        other_p_T, other_q_T = (1 - p_T).clamp(min=TINY), (1 - q_T).clamp(min=TINY)
        return q_T * (generator_T - now_T) + other_q_T * (other_q_T / other_p_T).log()
