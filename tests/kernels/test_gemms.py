"""The bf16 -> fp32 products on CPU, every kind and sizes of every remainder, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.kernels import heads, library


def error(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, more: float = 0.0) -> float:
    """Return the largest error of an element of a b + more, per sum of its absolute terms."""
    a, b = a.double(), b.double()
    return float(((got - a @ b - more).abs() / (a.abs() @ b.abs() + more)).max())


@settings(max_examples=25)
@given(
    C=st.integers(1, 70),
    H=st.integers(1, 140),
    V=st.integers(1, 600),
    gap=st.integers(0, 3),
    accumulate=st.booleans(),
)
def test_products_equal_float64_for_all_sizes(
    cpu_kernel: str, C: int, H: int, V: int, gap: int, accumulate: bool
) -> None:
    g = torch.Generator().manual_seed(C * H + V)
    head, _ = heads.select("fp32", "auto", torch.bfloat16, "cpu")
    assert head.upcasts == (cpu_kernel == "generic")
    weight_VH = torch.randn(V, H, generator=g).bfloat16()
    hidden_CH = torch.randn(C, H + gap, generator=g).bfloat16()[:, :H]
    logits_CV = torch.full((C, V + gap), float("nan"))[:, :V]
    head.logits(hidden_CH, weight_VH, logits_CV)
    assert error(logits_CV, hidden_CH, weight_VH.T) < 1e-6
    grads_CV = torch.full((C, V + gap), float("nan"), dtype=torch.bfloat16)[:, :V]
    grads_CV.copy_(torch.randn(C, V, generator=g))
    hidden_grad_CH = torch.full((C, H), float("nan"))
    head.hidden_grad(grads_CV, weight_VH, hidden_grad_CH)
    assert error(hidden_grad_CH, grads_CV, weight_VH) < 1e-6
    weight_grad_VH = torch.full((V, H), 1.0 if accumulate else float("nan"))
    head.weight_grad(grads_CV, hidden_CH, weight_grad_VH, accumulate)
    assert error(weight_grad_VH, grads_CV.T, hidden_CH, float(accumulate)) < 1e-6


def test_no_kind_is_left_out_here() -> None:
    missing = set(library.CPU_KERNELS) - set(library.load().cpu_kernels)
    if missing:
        pytest.skip(f"this processor does not run {', '.join(missing)}: not tested here")
