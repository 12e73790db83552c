"""DISPO: CISPO with separate bounds for correct and for wrong completions.

    L = sum_t  -w_t * sg(clip(rho_t, low(A_t), high(A_t))) * A_t * log pi(y_t)

(arXiv 2602.00983.) `rho` is pi / pi_gen; the bounds depend on the sign of the advantage, which
separates correct from wrong completions where rewards are a verified +-1.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megatron_rl.algorithm.losses.base import Loss, LossTerms, RatioReference, Tokens, ratio_of

Low = Annotated[float, Field(ge=0.0, le=1.0)]
High = Annotated[float, Field(ge=1.0)]


class Dispo(Loss):
    """DISPO, detached ratios with separate bounds for correct and wrong completions."""

    ratio_reference: ClassVar[RatioReference] = "generator"
    kind: Literal["dispo"] = "dispo"
    """Policy loss."""
    positive_min_ratio: Low = 0.0
    """Lower bound of pi_train / pi_gen where the advantage is positive; 0 for no bound."""
    positive_max_ratio: High = 5.0
    """Upper bound of pi_train / pi_gen where the advantage is positive."""
    negative_min_ratio: Low = 0.0
    """Lower bound of pi_train / pi_gen where the advantage is negative; 0 for no bound."""
    negative_max_ratio: High = 5.0
    """Upper bound of pi_train / pi_gen where the advantage is negative."""

    def terms(self, tokens: Tokens) -> LossTerms:
        """Return the terms; rho = 3 with bounds (0, 2) and (0, 4) gives weights 2 and 3."""
        ratio_T = ratio_of(tokens.logprobs_T.detach(), tokens.generator_logprobs_T)
        positive_T = ratio_T.clamp(self.positive_min_ratio, self.positive_max_ratio)
        negative_T = ratio_T.clamp(self.negative_min_ratio, self.negative_max_ratio)
        bounded_T = positive_T.where(tokens.advantages_T > 0, negative_T)
        return LossTerms(-bounded_T * tokens.advantages_T * tokens.logprobs_T, bounded_T != ratio_T)
