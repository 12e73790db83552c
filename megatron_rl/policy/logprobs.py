"""Log-probs and entropy of given tokens, computed in Megatron's output hook.

`response_logprobs` is the `output_processor` of `GPTModel.forward`: it selects the rows that
predict completion tokens before the LM head, so that logits exist for those rows only, in fp32,
and works on vocabulary-parallel shards without gathering them.

Shape legend: S positions, B sequences, H hidden, T selected rows, V vocabulary of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_rl.kernels.lm_head import fp32_linear


@dataclass(slots=True)
class RowSelection:
    """What the hook is asked for, and the entropy that it found."""

    rows_T: Tensor
    """Row of [S * B] that predicts each token: `(position - 1) * B + sequence`."""
    targets_T: Tensor
    """Token ids."""
    temperature: float
    vocabulary: int
    """Rows of the whole head that are real tokens; later ones are padding."""
    fp32_logits: bool
    tp_group: dist.ProcessGroup
    sequence_parallel: bool
    entropy_gradient: bool = False
    """Whether the entropy is differentiated (an entropy term in the objective)."""
    entropy_T: Tensor | None = None
    """Entropy of each row's distribution in nats; with gradient if that was asked for."""


class _VocabularyParallelLogprob(torch.autograd.Function):
    """(log-prob [T], entropy [T]) of fp32 logits [T, V] whose columns are split over a group."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        temperature: float,
        vocabulary: int,
        group: dist.ProcessGroup,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        rank, size, columns = group.rank(), group.size(), logits_TV.shape[1]
        first, parallel = rank * columns, size > 1 and len(targets_T) > 0
        if first + columns > vocabulary:
            logits_TV = logits_TV.clone()
            logits_TV[:, max(vocabulary - first, 0) :] = float("-inf")
        top_T = logits_TV.amax(dim=1)
        if parallel:
            dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=group)
        # Division comes after the subtraction, which rounds nothing near the top.
        shifted_TV = logits_TV - top_T[:, None]
        if temperature != 1.0:
            shifted_TV /= temperature
        weights_TV = shifted_TV.exp()
        column_T = targets_T - first
        mine_T = (column_T >= 0) & (column_T < columns)
        column_T = torch.where(mine_T, column_T, 0)
        sums_3T = torch.stack(
            [
                weights_TV.sum(dim=1),
                # A padded column is -inf with weight 0, and contributes nothing.
                (weights_TV * shifted_TV.clamp(min=-1e30)).sum(dim=1),
                torch.where(mine_T, shifted_TV.gather(1, column_T[:, None])[:, 0], 0.0),
            ]
        )
        if parallel:
            dist.all_reduce(sums_3T, group=group)
        log_sum_T = sums_3T[0].log()
        entropy_T = log_sum_T - sums_3T[1] / sums_3T[0]
        ctx.save_for_backward(
            weights_TV.div_(sums_3T[0][:, None]), column_T, mine_T, entropy_T.clone()
        )
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


def vocabulary_parallel_logprobs(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature: float,
    vocabulary: int,
    group: dist.ProcessGroup,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs [T] with gradient and entropies [T], of columns split over `group`.

    Args:
        logits_TV: fp32 logits of this rank's columns.
        targets_T: token ids in the whole vocabulary.
        temperature: divides the logits.
        vocabulary: columns beyond it, over the whole group, are padding and have probability 0.
        group: tensor-parallel group.
        entropy_gradient: whether the entropies have a gradient too.
    """
    logprobs_T, entropy_T = _VocabularyParallelLogprob.apply(
        logits_TV, targets_T, temperature, vocabulary, group, entropy_gradient
    )
    return logprobs_T, entropy_T


def response_logprobs(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: RowSelection,
    **_: Any,
) -> Tensor:
    """Megatron's `output_processor`: log-probs [T] of the tokens that `context` names.

    Args:
        hidden_states: [S, B, H], or this rank's part of S under sequence parallelism.
        output_layer: the LM head; its weight [V, H] unless `output_weight` (tied) is given.
        context: the rows; its `entropy_T` is set.
    """
    hidden_SBH = hidden_states
    if context.sequence_parallel:
        # The backward of this gather sums over the ranks' vocabulary shards.
        hidden_SBH = gather_from_sequence_parallel_region(
            hidden_SBH, tensor_parallel_output_grad=True, group=context.tp_group
        )
    hidden_TH = hidden_SBH.flatten(0, 1).index_select(0, context.rows_T)
    if not context.sequence_parallel and context.tp_group.size() > 1 and len(hidden_TH):
        hidden_TH = copy_to_tensor_model_parallel_region(hidden_TH, group=context.tp_group)
    weight_VH = output_layer.weight if output_weight is None else output_weight
    if context.fp32_logits:
        logits_TV = fp32_linear(hidden_TH, weight_VH)
    else:
        logits_TV = torch.nn.functional.linear(hidden_TH, weight_VH).float()
    logprobs_T, context.entropy_T = vocabulary_parallel_logprobs(
        logits_TV,
        context.targets_T,
        context.temperature,
        context.vocabulary,
        context.tp_group,
        context.entropy_gradient,
    )
    return logprobs_T
