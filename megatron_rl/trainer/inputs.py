"""What the objective takes beside the trained policy's log-probs: a step's arrays, cut as needed.

Shape legend: N flat positions of the step, T completion tokens of a micro-batch, C some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithm.losses.base import Tokens
from megatron_rl.algorithm.losses.cispo import Cispo
from megatron_rl.algorithm.objective import Sums, objective, objective_terms
from megatron_rl.algorithm.settings import Algorithm
from megatron_rl.kernels import linear
from megatron_rl.trainer.batch import MicroBatch
from megatron_rl.trainer.head import HeadLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """By flat position [N], on the CPU."""

    generator_logprobs: Tensor
    advantages: Tensor
    loss_weights: Tensor
    sequence_of: Tensor
    """int64: number of the position's sequence."""
    sequences: int
    old: Tensor | None
    """Log-probs of the old policy; None: the generator's, unless `old_is_current`."""
    old_is_current: bool
    """The old policy is the trained one, without its gradient."""
    reference: Tensor | None
    add_over_ranks: Callable[[Tensor], Tensor] | None = None
    """See `Tokens`."""

    def of(self, micro: MicroBatch, device: torch.device) -> MicroInputs:
        """Those of a micro-batch, on the device."""

        def own(flat: Tensor) -> Tensor:
            return flat[micro.source_T].to(device)

        generator_T = own(self.generator_logprobs)
        return MicroInputs(
            generator_logprobs_T=generator_T,
            advantages_T=own(self.advantages),
            loss_weights_T=own(self.loss_weights),
            sequences_T=own(self.sequence_of),
            sequences=self.sequences,
            old_logprobs_T=generator_T if self.old is None else own(self.old),
            old_is_current=self.old_is_current,
            reference_logprobs_T=None if self.reference is None else own(self.reference),
            add_over_ranks=self.add_over_ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroInputs:
    """The same, of one micro-batch [T]."""

    generator_logprobs_T: Tensor
    advantages_T: Tensor
    loss_weights_T: Tensor
    sequences_T: Tensor
    sequences: int
    old_logprobs_T: Tensor
    old_is_current: bool
    reference_logprobs_T: Tensor | None
    add_over_ranks: Callable[[Tensor], Tensor] | None

    def tokens(self, logprobs_C: Tensor, entropy_C: Tensor | None, place: slice) -> Tokens:
        """The tokens at a place in T, with their log-probs and entropies under the policy."""
        old_C = logprobs_C.detach() if self.old_is_current else self.old_logprobs_T[place]
        reference_T = self.reference_logprobs_T
        return Tokens(
            logprobs_T=logprobs_C,
            generator_logprobs_T=self.generator_logprobs_T[place],
            old_logprobs_T=old_C,
            advantages_T=self.advantages_T[place],
            loss_weights_T=self.loss_weights_T[place],
            sequences_T=self.sequences_T[place],
            sequences=self.sequences,
            entropy_T=entropy_C,
            reference_logprobs_T=None if reference_T is None else reference_T[place],
            complete=place == slice(None),
            add_over_ranks=self.add_over_ranks,
        )

    def loss(self, algorithm: Algorithm) -> HeadLoss:
        """The algorithm's objective of these tokens, for the LM head."""

        def terms(logprobs_C: Tensor, entropy_C: Tensor | None, place: slice) -> Tensor:
            return objective_terms(algorithm, self.tokens(logprobs_C, entropy_C, place)).loss_T

        cispo, loss = None, algorithm.loss
        if (
            isinstance(loss, Cispo)
            and algorithm.correction.kind == "none"
            and not algorithm.kl_coefficient
        ):
            cispo = linear.Cispo(
                self.generator_logprobs_T, self.advantages_T, self.loss_weights_T, loss.max_ratio
            )
        return HeadLoss(
            terms=terms,
            per_token=algorithm.per_token,
            entropy_gradient=algorithm.entropy_coefficient != 0.0,
            cispo=cispo,
        )

    def sums(self, algorithm: Algorithm, logprobs_T: Tensor, entropy_T: Tensor) -> Sums:
        """The objective's sums, for the metrics."""
        return objective(algorithm, self.tokens(logprobs_T, entropy_T, slice(None)))
