"""The own bf16 -> fp32 products on CPU against float64, for sizes of every remainder."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.kernels import heads
from megatron_rl.kernels.library import load
from tests.kernels.cases import largest

KINDS = [1, 2]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(
    C=st.integers(1, 70),
    H=st.integers(1, 140),
    V=st.integers(1, 600),
    gap=st.integers(0, 3),
    accumulate=st.booleans(),
)
def test_own_gemms_equal_float64_for_all_sizes(
    kind: int, C: int, H: int, V: int, gap: int, accumulate: bool
) -> None:
    if not load().can_run(kind):
        pytest.skip(f"this processor has no bf16 GEMM kind {kind}")
    g = torch.Generator().manual_seed(C * H + V)
    head = heads.CpuBf16(kind)
    weight_VH = torch.randn(V, H, generator=g).bfloat16()
    hidden_CH = torch.randn(C, H + gap, generator=g).bfloat16()[:, :H]
    logits_CV = torch.full((C, V + gap), float("nan"))[:, :V]
    head.logits(hidden_CH, weight_VH, logits_CV)
    scale = H**0.5
    assert largest(logits_CV, hidden_CH.double() @ weight_VH.double().T) < 1e-6 * scale * 4
    grads_CV = torch.full((C, V + gap), float("nan"), dtype=torch.bfloat16)[:, :V]
    grads_CV.copy_(torch.randn(C, V, generator=g))
    hidden_grad_CH = torch.full((C, H), float("nan"))
    head.hidden_grad(grads_CV, weight_VH, hidden_grad_CH)
    want = grads_CV.double() @ weight_VH.double()
    # The terms may cancel: fp32's error is in proportion to the sum of their sizes.
    sizes = grads_CV.double().abs() @ weight_VH.double().abs()
    assert ((hidden_grad_CH - want).abs() <= 1e-6 * sizes).all()
    weight_grad_VH = torch.full((V, H), 1.0 if accumulate else float("nan"))
    head.weight_grad(grads_CV, hidden_CH, weight_grad_VH, accumulate)
    want = grads_CV.double().T @ hidden_CH.double() + (1.0 if accumulate else 0.0)
    sizes = grads_CV.double().abs().T @ hidden_CH.double().abs() + 1.0
    assert ((weight_grad_VH - want).abs() <= 1e-6 * sizes).all()
