"""CISPO: REINFORCE with a detached importance weight that is truncated from above.

    L = sum_t  -w_t * sg(min(rho_t, cap)) * A_t * log pi(y_t),    rho_t = pi(y_t) / pi_gen(y_t)

(MiniMax-M1, arXiv 2506.13585, equation 4; ScaleRL, arXiv 2510.13786, section 4.) `sg` stops the
gradient, so that dL/dlogp_t = -w_t * min(rho_t, cap) * A_t exactly: no token is masked, and a
token beyond the cap keeps a bounded gradient. `pi_gen` is the generator's own log-prob at
sampling time. Shape legend: T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
    """The summed CISPO loss of these tokens.

    Args:
        logprobs_T: log-probs under the trained policy, with gradient.
        generator_logprobs_T: the generator's own, at sampling time.
        advantages_T: normalised advantages.
        loss_weights_T: all normalisation; 0 for tokens that are not trained.
        max_ratio: cap on rho, in ratio units.

    Example: logp = gen = -1, A = 2, w = 0.5: loss = 1.0, dL/dlogp = -1.0.
    """
    ratio_T = torch.exp(logprobs_T.detach() - generator_logprobs_T)
    coefficient_T = loss_weights_T * ratio_T.clamp(max=max_ratio) * advantages_T
    trained_T = loss_weights_T > 0
    return CispoSums(
        loss=-(coefficient_T * logprobs_T).sum(),
        clipped=((ratio_T > max_ratio) & trained_T).sum(),
        tokens=trained_T.sum(),
    )
