"""Log-probs and entropy of given tokens by autograd over all their logits.

The reference for `megatron_rl.kernels`, and the only method with the entropy's gradient;
vocabulary-parallel shards are not gathered. Shape legend: T rows, V vocabulary of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
