"""The objective over the LM head, computed in Megatron's output hook (`head_loss`).

    row kernel   CISPO: coefficients in the row kernel; three products
    one pass     every other loss of single tokens; three products
    two passes   losses with sums over a sequence: log-probs first; four products
    plain        the logits of all rows and autograd: for the entropy's gradient, or `kernels.head`

The head's gradient is in main_grad before the backward pass begins: the gradient that reaches the
summed loss is 1 (`megatron_build`), DDP reduces a bucket no earlier than after the backward pass of
its last parameter, and Megatron's schedules run each forward pass of the last stage once.

Shape legend: S positions, B sequences, H hidden, T selected rows, C rows of a chunk.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_rl.algorithm.losses.cispo import Cispo
from megatron_rl.algorithm.objective import Sums, objective, objective_terms
from megatron_rl.algorithm.settings import Algorithm
from megatron_rl.config import RunConfig
from megatron_rl.kernels import linear
from megatron_rl.kernels.fused import linear_logprobs, linear_loss
from megatron_rl.kernels.ops import fp32_linear
from megatron_rl.trainer.batch import MicroBatch
from megatron_rl.trainer.logprobs import vocabulary_parallel_logprobs

log = logging.getLogger(__name__)

Method = Literal["row kernel", "one pass", "two passes", "plain"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The algorithm of a step, as the LM head and the metrics need it."""

    algorithm: Algorithm
    old_is_current: bool = False
    """The old policy is the trained one, without its gradient."""

    def method(self, head: Literal["fused", "plain"]) -> Method:
        """Return how the loss is computed: the one place that decides."""
        a = self.algorithm
        if head == "plain" or a.entropy_coefficient:
            return "plain"
        if not a.per_token:
            return "two passes"
        pure = isinstance(a.loss, Cispo) and a.correction.kind == "none" and not a.kl_coefficient
        return "row kernel" if pure else "one pass"

    def terms(
        self, micro: MicroBatch, logprobs_C: Tensor, chunk: slice, entropy_C: Tensor | None = None
    ) -> Tensor:
        """Return the weighted loss terms [C] of a chunk of T; their sum is trained."""
        tokens = micro.tokens(logprobs_C, entropy_C, chunk, self.old_is_current)
        return objective_terms(self.algorithm, tokens).loss_T

    def sums(self, micro: MicroBatch) -> Sums:
        """Return the objective's sums over a micro-batch whose forward pass is done."""
        assert micro.logprobs_T is not None
        tokens = micro.tokens(micro.logprobs_T, micro.entropy_T, slice(None), self.old_is_current)
        return objective(self.algorithm, tokens)

    def cispo_inputs(self, micro: MicroBatch) -> linear.CispoInputs:
        """Return the inputs of the row kernel."""
        assert isinstance(self.algorithm.loss, Cispo)
        weights_T, cap = micro.loss_weights_T, self.algorithm.loss.max_ratio
        return linear.CispoInputs(micro.generator_logprobs_T, micro.advantages_T, weights_T, cap)


@dataclass(frozen=True, slots=True)
class LmHead:
    """The LM head's settings, constant over a run."""

    kind: Literal["fused", "plain"]
    sequence_parallel: bool
    settings: linear.HeadSettings

    @classmethod
    def of(cls, run: RunConfig, vocabulary: int, temperature: float | None = None) -> LmHead:
        """Return the head of a run's configuration; without a `temperature`, that of generation."""
        chunk_mib = run.kernels.chunk_mib
        return cls(
            run.kernels.head,
            run.parallel.sequence_parallel,
            linear.HeadSettings(
                temperature=temperature or run.generation.temperature,
                precision=run.precision.logits,
                logit_grads=run.precision.logit_grads,
                chunk_bytes=None if chunk_mib is None else int(chunk_mib * 2**20),
                vocabulary=vocabulary,
                group=parallel_state.get_tensor_model_parallel_group(),
            ),
        )


@dataclass(frozen=True, slots=True)
class HeadPass:
    """One call of the hook: a micro-batch, which takes the results, and how to compute them.

    Without an objective: log-probs alone, without gradient.
    """

    head: LmHead
    micro: MicroBatch
    objective: Objective | None


@cache
def _log_method(method: Method, kind: str) -> None:
    reason = " (kernels.head)" if kind == "plain" else ""
    log.info("loss over the LM head: %s%s", method, reason)


def head_loss(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: HeadPass,
    **_: Any,
) -> Tensor:
    """Return the summed loss of a micro-batch's tokens: Megatron's `output_processor`.

    `hidden_states` are [S, B, H], or this rank's part of S under sequence parallelism. A tied
    weight [V, H] takes the place of the layer's. `logprobs_T` and `entropy_T` of the micro-batch
    are set. Without an objective, the sum of the log-probs is returned.
    """
    head, micro, objective = context.head, context.micro, context.objective
    method: Method | None = None
    if objective is not None:
        method = objective.method(head.kind)
        _log_method(method, head.kind)
    plain = head.kind == "plain" if objective is None else method == "plain"
    hidden_SBH = hidden_states
    if head.sequence_parallel:
        # The kernels have summed the gradient over the vocabulary's shards; autograd has not.
        hidden_SBH = gather_from_sequence_parallel_region(
            hidden_SBH, tensor_parallel_output_grad=plain, group=head.settings["group"]
        )
    hidden_TH = hidden_SBH.flatten(0, 1).index_select(0, micro.rows_T)
    # The head is not called, so its hooks are: DDP ends a gather of parameters in them.
    for hook in output_layer._forward_pre_hooks.values():
        hook(output_layer, ())
    weight_VH = output_layer.weight if output_weight is None else output_weight
    if plain:
        return _plain(hidden_TH, weight_VH, context)
    return _fused(hidden_TH, weight_VH, context, method)


def _fused(
    hidden_TH: Tensor, weight_VH: Tensor, context: HeadPass, method: Method | None
) -> Tensor:
    settings, micro, objective = context.head.settings, context.micro, context.objective
    operands = (hidden_TH, weight_VH, micro.targets_T)
    if objective is None or method == "two passes":
        logprobs_T, micro.entropy_T = linear_logprobs(*operands, **settings)
        micro.logprobs_T = logprobs_T.detach()
        if objective is None:
            return logprobs_T.sum()
        return objective.terms(micro, logprobs_T, slice(None)).sum()
    terms = partial(objective.terms, micro)
    loss = objective.cispo_inputs(micro) if method == "row kernel" else terms
    done = linear_loss(*operands, loss, loss_scale=1.0, **settings)
    micro.logprobs_T, micro.entropy_T = done.logprobs_T.detach(), done.entropy_T.detach()
    return done.loss


def _plain(hidden_TH: Tensor, weight_VH: Tensor, context: HeadPass) -> Tensor:
    head, micro, objective = context.head, context.micro, context.objective
    settings, group, vocabulary = head.settings, head.settings["group"], head.settings["vocabulary"]
    assert group is not None and vocabulary is not None
    if not head.sequence_parallel and group.size() > 1 and len(hidden_TH):
        hidden_TH = copy_to_tensor_model_parallel_region(hidden_TH, group=group)
    entropy_gradient = objective is not None and objective.algorithm.entropy_coefficient != 0.0
    logits_TV = fp32_linear(hidden_TH, weight_VH, settings["precision"], settings["logit_grads"])
    logprobs_T, entropy_T = vocabulary_parallel_logprobs(
        logits_TV, micro.targets_T, settings["temperature"], vocabulary, group, entropy_gradient
    )
    micro.logprobs_T, micro.entropy_T = logprobs_T.detach(), entropy_T.detach()
    if objective is None:
        return logprobs_T.sum()
    entropy = entropy_T if entropy_gradient else None
    return objective.terms(micro, logprobs_T, slice(None), entropy).sum()
