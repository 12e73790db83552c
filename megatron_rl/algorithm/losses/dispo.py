"""DISPO: CISPO with bounds of its own for right and for wrong completions.

    L = sum_t  -w_t * sg(clip(rho_t, low(A_t), high(A_t))) * A_t * log pi(y_t)

(arXiv 2602.00983.) `rho` is pi / pi_gen; the bounds are those for positive or for negative
advantages, which with a verified +-1 reward are the right and the wrong completions.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megatron_rl.algorithm.losses.base import Against, Loss, Terms, Tokens, ratio_of

Low = Annotated[float, Field(ge=0.0, le=1.0)]
High = Annotated[float, Field(ge=1.0)]


class Dispo(Loss):
    """DISPO, detached ratios with separate bounds for right and wrong completions."""

    against: ClassVar[Against] = "generator"
    kind: Literal["dispo"] = "dispo"
    """Policy loss."""
    positive_min_ratio: Low = 0.0
    """Lower bound of pi_train / pi_gen where the advantage is positive; 0 is none."""
    positive_max_ratio: High = 5.0
    """Upper bound of pi_train / pi_gen where the advantage is positive."""
    negative_min_ratio: Low = 0.0
    """Lower bound of pi_train / pi_gen where the advantage is negative; 0 is none."""
    negative_max_ratio: High = 5.0
    """Upper bound of pi_train / pi_gen where the advantage is negative."""

    def terms(self, tokens: Tokens) -> Terms:
        """Example: rho = 3, bounds (0, 2) for A > 0 and (0, 4) for A < 0: weights 2 and 3."""
        ratio_T = ratio_of(tokens.logprobs_T.detach(), tokens.generator_logprobs_T)
        bounded_T = ratio_T.clamp(self.positive_min_ratio, self.positive_max_ratio).where(
            tokens.advantages_T > 0,
            ratio_T.clamp(self.negative_min_ratio, self.negative_max_ratio),
        )
        return Terms(-bounded_T * tokens.advantages_T * tokens.logprobs_T, bounded_T != ratio_T)
