"""LM head with fp32 results: operands as they are stored, products summed in fp32.

Products of bf16 numbers are exact in fp32, so this equals upcasting both operands up to the order
of the sums; no fp32 copy of the weight is kept, so none can go stale.

Shape legend: T rows, H hidden, V vocabulary of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32 for equal dtypes; on CUDA without upcast copies."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class _FP32Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_VH)
        return _mm_fp32(hidden_TH, weight_VH.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad_TV,) = grads
        hidden_TH, weight_VH = ctx.saved_tensors
        # On CUDA the gradient takes the operands' dtype, as the rest of a bf16 backward does; on
        # CPU it stays fp32, which is exact and costs nothing extra.
        if grad_TV.is_cuda:
            grad_TV = grad_TV.to(weight_VH.dtype)
        grad_hidden_TH = grad_TV @ weight_VH.to(grad_TV.dtype)
        grad_weight_VH = grad_TV.t() @ hidden_TH.to(grad_TV.dtype)
        return grad_hidden_TH.to(hidden_TH.dtype), grad_weight_VH.to(weight_VH.dtype)


def fp32_linear(hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """Logits [T, V] in fp32 of hidden states [T, H] and a head [V, H] of any one dtype."""
    logits: Tensor = _FP32Linear.apply(hidden_TH, weight_VH)
    return logits
