"""The objective over the LM head, computed in Megatron's output hook (`head_loss`).

    row kernel   CISPO: coefficients in the row kernel; three products
    one pass     every other loss of single tokens; three products
    two passes   losses with sums over a sequence: log-probs first; four products
    plain        the logits of all rows and autograd: for the entropy's gradient, or `kernels.head`

The head's gradient is in main_grad before the backward pass begins: the gradient that reaches the
summed loss is 1 (`megatron_build`), DDP reduces a bucket no earlier than after the backward pass of
its last parameter, and Megatron's schedules run each forward pass of the last stage once.

Shape legend: S positions, B sequences, H hidden, T selected rows, C rows of a chunk, V vocabulary
of this rank.
"""

import logging
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
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

log = logging.getLogger(__name__)

Method = Literal["row kernel", "one pass", "two passes", "plain"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The algorithm of a step, as the LM head and the metrics need it."""

    algorithm: Algorithm
    old_is_current: bool = False  # the old policy is the trained one, without its gradient

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
class HeadPass:
    """One call of the hook: a micro-batch, which takes the results, and how to compute them.

    Without an objective: log-probs alone, without gradient.
    """

    run: RunConfig
    vocabulary: int
    micro: MicroBatch
    objective: Objective | None
    temperature: float | None = None  # divides the logits; None: that of generation

    @property
    def settings(self) -> linear.HeadSettings:
        """Keyword arguments of the kernels, in the Megatron world of this process."""
        run, chunk_mib = self.run, self.run.kernels.chunk_mib
        return linear.HeadSettings(
            temperature=self.temperature or run.generation.temperature,
            precision=run.precision.logits,
            logit_grads=run.precision.logit_grads,
            chunk_bytes=None if chunk_mib is None else int(chunk_mib * 2**20),
            vocabulary=self.vocabulary,
            group=parallel_state.get_tensor_model_parallel_group(),
        )


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
    micro, objective, settings = context.micro, context.objective, context.settings
    kind, hidden_SBH = context.run.kernels.head, hidden_states
    method: Method = "plain" if kind == "plain" else "two passes"
    if objective is not None:
        method = objective.method(kind)
        _log_method(method, kind)
    if context.run.parallel.sequence_parallel:
        # The kernels have summed the gradient over the vocabulary's shards; autograd has not.
        hidden_SBH = gather_from_sequence_parallel_region(
            hidden_SBH, tensor_parallel_output_grad=method == "plain", group=settings["group"]
        )
    hidden_TH = hidden_SBH.flatten(0, 1).index_select(0, micro.rows_T)
    # The head is not called, so its hooks are: DDP ends a gather of parameters in them.
    for hook in output_layer._forward_pre_hooks.values():
        hook(output_layer, ())
    weight_VH = output_layer.weight if output_weight is None else output_weight
    operands = (hidden_TH, weight_VH, micro.targets_T)
    if objective is not None and method in ("row kernel", "one pass"):
        terms = partial(objective.terms, micro)
        loss = objective.cispo_inputs(micro) if method == "row kernel" else terms
        done = linear_loss(*operands, loss, loss_scale=1.0, **settings)
        micro.logprobs_T, micro.entropy_T = done.logprobs_T.detach(), done.entropy_T.detach()
        return done.loss
    if method == "plain":
        logprobs_T, entropy_T = _plain_logprobs(hidden_TH, weight_VH, context)
    else:
        logprobs_T, entropy_T = linear_logprobs(*operands, **settings)
    micro.logprobs_T, micro.entropy_T = logprobs_T.detach(), entropy_T.detach()
    if objective is None:
        return logprobs_T.sum()
    entropy = entropy_T if objective.algorithm.entropy_coefficient else None
    return objective.terms(micro, logprobs_T, slice(None), entropy).sum()


def _plain_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, context: HeadPass
) -> tuple[Tensor, Tensor]:
    settings, objective = context.settings, context.objective
    group, precision = settings["group"], (settings["precision"], settings["logit_grads"])
    assert group is not None
    gathered = context.run.parallel.sequence_parallel
    if not gathered and group.size() > 1 and len(hidden_TH):
        hidden_TH = copy_to_tensor_model_parallel_region(hidden_TH, group=group)
    return vocabulary_parallel_logprobs(
        fp32_linear(hidden_TH, weight_VH, *precision),
        context.micro.targets_T,
        settings["temperature"],
        context.vocabulary,
        group,
        objective is not None and objective.algorithm.entropy_coefficient != 0.0,
    )


class _VocabularyParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        temperature: float,
        vocabulary: int,
        group: dist.ProcessGroup,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        rank, size, columns = group.rank(), group.size(), logits_TV.shape[1]
        first, parallel = rank * columns, size > 1 and len(targets_T) > 0
        if first + columns > vocabulary:
            logits_TV = logits_TV.clone()
            logits_TV[:, max(vocabulary - first, 0) :] = float("-inf")
        top_T = logits_TV.amax(dim=1)
        if parallel:
            dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=group)
        # Divide after the subtraction, which is exact near the maximum.
        shifted_TV = logits_TV - top_T[:, None]
        if temperature != 1.0:
            shifted_TV /= temperature
        weights_TV = shifted_TV.exp()
        column_T = targets_T - first
        mine_T = (column_T >= 0) & (column_T < columns)
        column_T = torch.where(mine_T, column_T, 0)
        # A padded column is -inf with weight 0, and contributes nothing.
        moment_T = (weights_TV * shifted_TV.clamp(min=-1e30)).sum(dim=1)
        own_T = torch.where(mine_T, shifted_TV.gather(1, column_T[:, None])[:, 0], 0.0)
        sums_3T = torch.stack([weights_TV.sum(dim=1), moment_T, own_T])
        if parallel:
            dist.all_reduce(sums_3T, group=group)
        log_sum_T = sums_3T[0].log()
        entropy_T = log_sum_T - sums_3T[1] / sums_3T[0]
        probs_TV = weights_TV.div_(sums_3T[0][:, None])
        ctx.save_for_backward(probs_TV, column_T, mine_T, entropy_T.clone())
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return sums_3T[2] - log_sum_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probs_TV, column_T, mine_T, entropy_T = ctx.saved_tensors
        grad_T = grads[0] / ctx.temperature
        grad_TV = probs_TV * -grad_T[:, None]
        grad_TV.scatter_add_(1, column_T[:, None], (grad_T * mine_T)[:, None])
        if ctx.entropy_gradient:
            # dH/dx_j = -p_j (log p_j + H); a probability of 0 contributes nothing.
            log_probs_TV = probs_TV.clamp(min=torch.finfo(probs_TV.dtype).tiny).log()
            slope_TV = -probs_TV * (log_probs_TV + entropy_T[:, None])
            grad_TV += slope_TV * (grads[1] / ctx.temperature)[:, None]
        return grad_TV, None, None, None, None, None


vocabulary_parallel_logprobs = _VocabularyParallelLogprob.apply
"""Return log-probs [T] with gradient and entropies [T], of fp32 logits [T, V] split over `group`.

`targets_T` are ids of the whole vocabulary, whose columns beyond `vocabulary` are padding with
probability 0. `temperature` divides the logits. The entropies have a gradient with
`entropy_gradient`. The order of the arguments is that of `forward`.
"""
