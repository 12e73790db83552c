"""CISPO: REINFORCE with a detached importance weight that is truncated from above.

    L = sum_t  -w_t * sg(min(rho_t, cap)) * A_t * log pi(y_t),    rho_t = pi(y_t) / pi_gen(y_t)

(MiniMax-M1, arXiv 2506.13585, equation 4; ScaleRL, arXiv 2510.13786, section 4.) `sg` stops the
gradient, so that dL/dlogp_t = -w_t * min(rho_t, cap) * A_t exactly: no token is masked, and a
token beyond the cap keeps a bounded gradient. `pi_gen` is the generator's own log-prob at
sampling time, never a recomputed one: with one update per batch that would be the current policy,
and the cap would never bite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import PositiveFloat

from megatron_rl.algorithm.losses.base import Against, Loss, Terms, Tokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor


class Cispo(Loss):
    """CISPO, ScaleRL's loss."""

    against: ClassVar[Against] = "generator"
    kind: Literal["cispo"] = "cispo"
    """Policy loss."""
    max_ratio: PositiveFloat = 5.0
    """Cap on pi_train / pi_gen in ratio units (the paper's eps_max)."""

    def terms(self, tokens: Tokens) -> Terms:
        """Example: logp = gen = -1, A = 2: loss 2, dL/dlogp = -2."""
        ratio_T = ratio_of(tokens.logprobs_T.detach(), tokens.generator_logprobs_T)
        coefficient_T = ratio_T.clamp(max=self.max_ratio) * tokens.advantages_T
        return Terms(-coefficient_T * tokens.logprobs_T, ratio_T > self.max_ratio)


class CispoSums(NamedTuple):
    """Sums over the given tokens; add them over micro-batches and ranks."""

    loss: Tensor
    """With gradient."""
    clipped: Tensor
    """Tokens of positive weight whose ratio exceeds the cap."""
    tokens: Tensor
    """Tokens of positive weight."""


def cispo(
    logprobs_T: Tensor,
    generator_logprobs_T: Tensor,
    advantages_T: Tensor,
    loss_weights_T: Tensor,
    max_ratio: float,
) -> CispoSums:
    """The summed CISPO loss of these tokens: what the fused kernel must equal.

    Args:
        logprobs_T: log-probs under the trained policy, with gradient.
        generator_logprobs_T: the generator's own, at sampling time.
        advantages_T: normalised advantages.
        loss_weights_T: all normalisation; 0 for tokens that are not trained.
        max_ratio: cap on rho, in ratio units.

    Example: logp = gen = -1, A = 2, w = 0.5: loss = 1.0, dL/dlogp = -1.0.
    """
    tokens = Tokens(
        logprobs_T=logprobs_T,
        generator_logprobs_T=generator_logprobs_T,
        old_logprobs_T=generator_logprobs_T,
        advantages_T=advantages_T,
        loss_weights_T=loss_weights_T,
        sequences_T=(loss_weights_T * 0).long(),
        sequences=1,
    )
    loss_T, cut_T = Cispo(max_ratio=max_ratio).terms(tokens)
    trained_T = tokens.trained_T
    return CispoSums((loss_weights_T * loss_T).sum(), (cut_T & trained_T).sum(), trained_T.sum())
