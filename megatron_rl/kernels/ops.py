"""Whole-loss operators under `torch.library`: schema, fake and autograd, opaque to torch.compile.

    megatron_rl::fp32_linear        logits [T, V] in fp32
    megatron_rl::linear_cispo       one pass of `linear`: loss, rows [5, T], gradients
    megatron_rl::scaled             a fp32 gradient times a scalar, in another type

The row operators (`csrc/library.cpp`, `library.SCHEMAS`) lie below them:

    row_stats     fp32 logits [C, V] -> [4, C] largest logit, sum e^d, sum d e^d, target's logit;
                  targets are global ids, this shard holds ids from `first`, columns from `columns`
                  on are padding, d = scale (x - largest)
    merge_rows    [R, 4, C] of all shards -> [4, C] log-prob, entropy, largest logit, sum e^d
    cispo_terms   [C] log-probs, generator's, advantages, weights -> [3, C] ratio, coefficient, loss
    row_grads_    logits become coefficient scale (onehot - p), 0 in padding; `bf16`: in the front
                  half of each row's bytes
    cispo_rows_   all four in one go for one shard -> [5, C] log-prob, entropy, ratio, coefficient,
                  loss

Shape legend: T tokens, C rows, V vocabulary of this rank, H hidden, R shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.kernels import heads, linear
from megatron_rl.kernels.linear import Cispo, Plan

_BLOCK = 8192


def _group(name: str) -> torch.distributed.ProcessGroup | None:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name) if name else None


# ---- fp32_linear ---------------------------------------------------------------------------------


@torch.library.custom_op("megatron_rl::fp32_linear", mutates_args=())
def fp32_linear(hidden_TH: Tensor, weight_VH: Tensor, precision: str, logit_grads: str) -> Tensor:
    """Logits [T, V] in fp32; the two backward products take fp32 or bf16 gradients."""
    head, _ = heads.select(precision, logit_grads, hidden_TH.dtype, hidden_TH.device.type)
    logits_TV = hidden_TH.new_empty(len(hidden_TH), len(weight_VH), dtype=torch.float32)
    head.logits(hidden_TH, weight_VH, logits_TV)
    return logits_TV


@fp32_linear.register_fake
def _(hidden_TH: Tensor, weight_VH: Tensor, precision: str, logit_grads: str) -> Tensor:
    return hidden_TH.new_empty(hidden_TH.shape[0], weight_VH.shape[0], dtype=torch.float32)


@torch.library.custom_op("megatron_rl::fp32_linear_backward", mutates_args=())
def fp32_linear_backward(
    grad_TV: Tensor, hidden_TH: Tensor, weight_VH: Tensor, precision: str, logit_grads: str
) -> tuple[Tensor, Tensor]:
    """Gradients by hidden states and weight, in their own types."""
    head, dtype = heads.select(precision, logit_grads, hidden_TH.dtype, hidden_TH.device.type)
    grad_TV = grad_TV.to(dtype).contiguous()
    hidden_grad_TH = hidden_TH.new_empty(hidden_TH.shape, dtype=torch.float32)
    weight_grad_VH = weight_VH.new_empty(weight_VH.shape, dtype=torch.float32)
    head.hidden_grad(grad_TV, weight_VH, hidden_grad_TH)
    head.weight_grad(grad_TV, hidden_TH, weight_grad_VH, False)
    return hidden_grad_TH.to(hidden_TH.dtype), weight_grad_VH.to(weight_VH.dtype)


@fp32_linear_backward.register_fake
def _(
    grad_TV: Tensor, hidden_TH: Tensor, weight_VH: Tensor, precision: str, logit_grads: str
) -> tuple[Tensor, Tensor]:
    return hidden_TH.new_empty(hidden_TH.shape), weight_VH.new_empty(weight_VH.shape)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.settings = inputs[2:]


def _linear_backward(ctx: Any, grad_TV: Tensor) -> tuple[Tensor | None, ...]:
    grads = fp32_linear_backward(grad_TV, *ctx.saved_tensors, *ctx.settings)
    return *grads, None, None


fp32_linear.register_autograd(_linear_backward, setup_context=_save_linear)


# ---- linear_cispo --------------------------------------------------------------------------------


@torch.library.custom_op("megatron_rl::linear_cispo", mutates_args=())
def _linear_cispo(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    generator_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    max_ratio: float,
    temperature: float,
    vocabulary: int,
    group: str,
    precision: str,
    logit_grads: str,
    chunk_bytes: int,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, rows [5, T], hidden gradient, fp32 weight gradient); gradients empty if not asked."""
    plan = Plan(
        temperature=temperature,
        vocabulary=vocabulary,
        group=_group(group),
        precision=precision,  # type: ignore[arg-type]
        logit_grads=logit_grads,  # type: ignore[arg-type]
        chunk_bytes=chunk_bytes if chunk_bytes >= 0 else None,
    )
    loss = Cispo(generator_logprobs_T, advantages_T, weights_T, max_ratio)
    done = linear.one_pass(
        hidden_TH, weight_VH, targets_T, loss, plan, grads=(hidden_grad, weight_grad)
    )
    hidden_TH_grad, weight_VH_grad = done.hidden_grad_TH, done.weight_grad_VH
    if hidden_TH_grad is None:
        hidden_TH_grad = hidden_TH.new_empty(0)
    if weight_VH_grad is None:
        weight_VH_grad = hidden_TH.new_empty(0, dtype=torch.float32)
    return done.rows_5T[4].double().sum().float(), done.rows_5T, hidden_TH_grad, weight_VH_grad


@_linear_cispo.register_fake
def _(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden_grad, weight_grad = rest[-2:]
    fp32 = {"dtype": torch.float32}
    return (
        hidden_TH.new_empty((), **fp32),
        hidden_TH.new_empty(5, hidden_TH.shape[0], **fp32),
        hidden_TH.new_empty(hidden_TH.shape if hidden_grad else 0),
        weight_VH.new_empty(weight_VH.shape if weight_grad else 0, **fp32),
    )


def _save_cispo(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.dtype = inputs[1].dtype
    ctx.wanted = inputs[-2:]
    ctx.set_materialize_grads(False)


def _cispo_backward(ctx: Any, grad: Tensor | None, *_: Tensor) -> tuple[Tensor | None, ...]:
    hidden_grad_TH, weight_grad_VH = ctx.saved_tensors
    hidden = weight = None
    if grad is not None and ctx.wanted[0]:
        hidden = hidden_grad_TH * grad.to(hidden_grad_TH.dtype)
    if grad is not None and ctx.wanted[1]:
        weight = scaled(weight_grad_VH, grad, ctx.dtype)
    return hidden, weight, *[None] * 13


_linear_cispo.register_autograd(_cispo_backward, setup_context=_save_cispo)


@torch.library.custom_op("megatron_rl::scaled", mutates_args=())
def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor in `dtype`, a block of rows at a time: no second fp32 copy."""
    out = torch.empty_like(gradient, dtype=dtype)
    for i in range(0, len(gradient), _BLOCK):
        out[i : i + _BLOCK] = gradient[i : i + _BLOCK] * factor
    return out


@scaled.register_fake
def _(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


def linear_cispo(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, loss: Cispo, plan: Plan
) -> tuple[Tensor, Tensor]:
    """(loss with gradient, rows [5, T] without) through the operator."""
    on = torch.is_grad_enabled()
    total, rows_5T, _, _ = _linear_cispo(
        *(hidden_TH, weight_VH, targets_T),
        *(loss.generator_logprobs_T, loss.advantages_T, loss.weights_T, loss.max_ratio),
        *(plan.temperature, plan.vocabulary),
        plan.group.group_name if plan.group is not None and plan.group.size() > 1 else "",
        *(plan.precision, plan.logit_grads),
        -1 if plan.chunk_bytes is None else plan.chunk_bytes,
        *(on and hidden_TH.requires_grad, on and weight_VH.requires_grad),
    )
    return total, rows_5T
