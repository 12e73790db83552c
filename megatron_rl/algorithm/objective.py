"""The objective of a micro-batch: loss, importance correction, KL to a reference, entropy.

    sum_t w_t * ( f_t * loss_t  +  kl_coefficient * k3_t  -  entropy_coefficient * H_t )
    k3_t = exp(d_t) - d_t - 1,    d_t = log pi_ref(y_t) - log pi(y_t)

Only this module multiplies terms by loss weights. `k3` estimates KL(pi || pi_ref) per token and is
never negative (GRPO, arXiv 2402.03300, equation 4); its gradient by the log-prob is 1 - exp(d).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.algorithm.losses.base import Tokens
from megatron_rl.algorithm.settings import Algorithm

if TYPE_CHECKING:
    from torch import Tensor


class ObjectiveTerms(NamedTuple):
    """The objective of each token."""

    loss_T: Tensor  # weighted loss with gradient
    clipped_T: Tensor  # bool: the loss clipped the token's ratio or masked the token
    corrected_T: Tensor  # bool: the importance correction truncated or masked the token
    reference_kl_T: Tensor  # k3 in nats, unweighted and without gradient; 0 without a KL term


class Sums(NamedTuple):
    """Sums of `ObjectiveTerms` over a micro-batch; add them over micro-batches and ranks."""

    loss: Tensor
    tokens: Tensor  # tokens of positive weight; the other counts are subsets
    clipped: Tensor
    corrected: Tensor
    reference_kl: Tensor


def objective_terms(algorithm: Algorithm, tokens: Tokens) -> ObjectiveTerms:
    """Return the objective of each token; with `algorithm.per_token` a chunk of tokens is enough.

    Raises:
        ValueError: the KL term without reference log-probs, or the entropy term without entropies.
    """
    terms = algorithm.loss.terms(tokens)
    correction = algorithm.correction.factor(tokens)
    total_T = correction.factor_T * terms.loss_T
    reference_kl_T = tokens.loss_weights_T.new_zeros(())
    if algorithm.kl_coefficient:
        if tokens.reference_logprobs_T is None:
            key = f"algorithm.kl_coefficient is {algorithm.kl_coefficient:g}"
            raise ValueError(f"{key}: the KL term needs the reference policy's log-probs")
        difference_T = tokens.reference_logprobs_T - tokens.logprobs_T
        k3_T = difference_T.exp() - difference_T - 1
        total_T = total_T + algorithm.kl_coefficient * k3_T
        reference_kl_T = k3_T.detach()
    if algorithm.entropy_coefficient:
        if tokens.entropy_T is None:
            key = f"algorithm.entropy_coefficient is {algorithm.entropy_coefficient:g}"
            raise ValueError(f"{key}: the entropy term needs entropies")
        total_T = total_T - algorithm.entropy_coefficient * tokens.entropy_T
    loss_T = tokens.loss_weights_T * total_T
    return ObjectiveTerms(loss_T, terms.clipped_T, correction.corrected_T, reference_kl_T)


def objective(algorithm: Algorithm, tokens: Tokens) -> Sums:
    """Return the summed objective of these tokens; raises the errors of `objective_terms`."""
    terms, trained_T = objective_terms(algorithm, tokens), tokens.trained_T
    return Sums(
        loss=terms.loss_T.sum(),
        tokens=trained_T.sum(),
        clipped=(terms.clipped_T & trained_T).sum(),
        corrected=(terms.corrected_T & trained_T).sum(),
        reference_kl=(terms.reference_kl_T * trained_T).sum(),
    )
