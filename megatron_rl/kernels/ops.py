"""Operators of `torch.library` with fakes and autograd, opaque to torch.compile.

They are built from the row operators of `csrc` (`cispo_reference` documents those). Shape legend:
T tokens, V vocabulary of this rank, H hidden.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_rl.kernels import heads, linear
from megatron_rl.kernels.linear import CispoInputs

_BLOCK = 8192


@torch.library.custom_op("megatron_rl::fp32_linear", mutates_args=())
def fp32_linear(
    hidden_TH: Tensor, weight_VH: Tensor, precision: str = "fp32", logit_grads: str = "auto"
) -> Tensor:
    """Return the fp32 logits [T, V] of hidden states [T, H] and a head [V, H] of the same type.

    The result equals that of fp32 copies of bf16 operands up to the order of the sums.
    """
    products, _ = heads.select(precision, logit_grads, hidden_TH.dtype, hidden_TH.device.type)
    logits_TV = hidden_TH.new_empty(len(hidden_TH), len(weight_VH), dtype=torch.float32)
    products.logits(hidden_TH, weight_VH, logits_TV)
    return logits_TV


fp32_linear.register_fake(lambda h, w, *_: h.new_empty(len(h), len(w), dtype=torch.float32))


@torch.library.custom_op("megatron_rl::fp32_linear_backward", mutates_args=())
def fp32_linear_backward(
    grad_TV: Tensor, hidden_TH: Tensor, weight_VH: Tensor, precision: str, logit_grads: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients by hidden states and weight, in their own types."""
    products, dtype = heads.select(precision, logit_grads, hidden_TH.dtype, hidden_TH.device.type)
    grad_TV = grad_TV.to(dtype).contiguous()
    hidden_grad_TH = hidden_TH.new_empty(hidden_TH.shape, dtype=torch.float32)
    weight_grad_VH = weight_VH.new_empty(weight_VH.shape, dtype=torch.float32)
    products.hidden_grad(grad_TV, weight_VH, hidden_grad_TH)
    products.weight_grad(grad_TV, hidden_TH, weight_grad_VH, False)
    return hidden_grad_TH.to(hidden_TH.dtype), weight_grad_VH.to(weight_VH.dtype)


fp32_linear_backward.register_fake(
    lambda grad, h, w, *_: (h.new_empty(h.shape), w.new_empty(w.shape))
)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.settings = inputs[2:]


def _linear_backward(ctx: Any, grad_TV: Tensor) -> tuple[Tensor | None, ...]:
    grads = fp32_linear_backward(grad_TV, *ctx.saved_tensors, *ctx.settings)
    return *grads, None, None


fp32_linear.register_autograd(_linear_backward, setup_context=_save_linear)


@torch.library.custom_op("megatron_rl::linear_cispo", mutates_args=())
def linear_cispo(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    generator_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    max_ratio: float,
    hidden_grad: bool,
    weight_grad: bool,
    temperature: float = 1.0,
    vocabulary: int | None = None,
    group: str = "",
    precision: str = "fp32",
    logit_grads: str = "auto",
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, rows [5, T], hidden and fp32 weight gradient; empty if not requested."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    rows_5T, *grads = linear.one_pass(
        hidden_TH,
        weight_VH,
        targets_T,
        CispoInputs(generator_logprobs_T, advantages_T, weights_T, max_ratio),
        grads=(hidden_grad, weight_grad),
        temperature=temperature,
        vocabulary=vocabulary,
        group=_resolve_process_group(group) if group else None,
        precision=precision,  # type: ignore[arg-type]
        logit_grads=logit_grads,  # type: ignore[arg-type]
        chunk_bytes=chunk_bytes,
    )
    empty = (hidden_TH.new_empty(0), hidden_TH.new_empty(0, dtype=torch.float32))
    hidden, weight = (e if g is None else g for g, e in zip(grads, empty, strict=True))
    return rows_5T[4].double().sum().float(), rows_5T, hidden, weight


@linear_cispo.register_fake
def _(h: Tensor, w: Tensor, targets_T: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    hidden_shape, weight_shape = h.shape if rest[4] else 0, w.shape if rest[5] else 0
    shapes = ((), (5, h.shape[0]), weight_shape)
    loss, rows_5T, weight_grad_VH = (h.new_empty(s, dtype=torch.float32) for s in shapes)
    return loss, rows_5T, h.new_empty(hidden_shape), weight_grad_VH


def _save_cispo(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.dtype, ctx.requested = inputs[1].dtype, inputs[7:9]
    ctx.set_materialize_grads(False)


def _cispo_backward(ctx: Any, grad: Tensor | None, *_: Tensor) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 15
    hidden_TH, weight_VH = ctx.saved_tensors
    hidden = hidden_TH * grad.to(hidden_TH.dtype) if ctx.requested[0] else None
    weight = scaled(weight_VH, grad, ctx.dtype) if ctx.requested[1] else None
    return hidden, weight, *[None] * 13


linear_cispo.register_autograd(_cispo_backward, setup_context=_save_cispo)


@torch.library.custom_op("megatron_rl::scaled", mutates_args=())
def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient * factor in `dtype`, by blocks of rows: no second fp32 copy."""
    out = torch.empty_like(gradient, dtype=dtype)
    for i in range(0, len(gradient), _BLOCK):
        out[i : i + _BLOCK] = gradient[i : i + _BLOCK] * factor
    return out


scaled.register_fake(lambda gradient, factor, dtype: torch.empty_like(gradient, dtype=dtype))
