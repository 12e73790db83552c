"""CISPO: REINFORCE with a detached importance weight that is truncated from above.

    L = sum_t  -w_t * sg(min(rho_t, cap)) * A_t * log pi(y_t),    rho_t = pi(y_t) / pi_gen(y_t)

(MiniMax-M1, arXiv 2506.13585, equation 4; ScaleRL, arXiv 2510.13786, section 4.) `sg` stops the
gradient, so dL/dlogp_t = -w_t * min(rho_t, cap) * A_t exactly: no token is masked, and a token
beyond the cap keeps a bounded gradient. `pi_gen` is the generator's own log-prob at sampling time,
not a recomputed one: with one update per batch that would be the current policy, and the cap would
have no effect.
"""

from typing import ClassVar, Literal

from pydantic import PositiveFloat

from megatron_rl.algorithm.losses.base import Loss, LossTerms, RatioReference, Tokens, ratio_of


class Cispo(Loss):
    """CISPO, ScaleRL's loss."""

    ratio_reference: ClassVar[RatioReference] = "generator"
    kind: Literal["cispo"] = "cispo"
    """Policy loss."""
    max_ratio: PositiveFloat = 5.0
    """Cap on pi_train / pi_gen in ratio units (the paper's eps_max)."""

    def terms(self, tokens: Tokens) -> LossTerms:
        """Return the terms; logp = gen = -1 and A = 2 give loss 2 and dL/dlogp = -2."""
        ratio_T = ratio_of(tokens.logprobs_T.detach(), tokens.generator_logprobs_T)
        coefficient_T = ratio_T.clamp(max=self.max_ratio) * tokens.advantages_T
        return LossTerms(-coefficient_T * tokens.logprobs_T, ratio_T > self.max_ratio)
