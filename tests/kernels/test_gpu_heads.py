"""The GPU heads' calls: operands, layouts and types as Transformer Engine and torch document them.

Stand-ins with those conventions take their place on CPU: nothing here exercises the real ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.kernels import heads, transformer_engine
from megatron_rl.kernels.library import load
from tests.kernels.cases import largest, leaves, linear_case, relative, run
from tests.te_stand_in import general_gemm


@pytest.fixture
def head() -> heads.HeadProducts:
    return heads.with_transformer_engine(general_gemm)


def test_three_products(head: heads.HeadProducts) -> None:
    C, H, V = 16, 24, 40
    h, w, d = (torch.randn(*s).bfloat16() for s in ((C, H), (V, H), (C, V)))
    logits, hidden_grad = torch.empty(C, V), torch.empty(C, H)
    weight_grad = torch.ones(V, H)
    head.logits(h, w, logits)
    head.hidden_grad(d, w, hidden_grad)
    narrow = torch.empty(C, H, dtype=torch.bfloat16)
    head.hidden_grad(d, w, narrow)
    assert torch.equal(narrow, hidden_grad.bfloat16())
    head.weight_grad(d, h, weight_grad, True)
    assert relative(logits, h.double() @ w.double().T) < 1e-6
    assert relative(hidden_grad, d.double() @ w.double()) < 1e-6
    assert relative(weight_grad, 1 + d.double().T @ h.double()) < 1e-6


def test_strided_gradients_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    names = ("logits", "hidden_grad", "weight_grad")
    by_torch = (lambda *_, name=name: taken.append(name) for name in names)
    monkeypatch.setattr(heads, "CUDA_TORCH", heads.HeadProducts("torch", *by_torch))
    head = heads.with_transformer_engine(general_gemm)
    C, H, V = 16, 24, 40
    h, w = torch.randn(C, H).bfloat16(), torch.randn(V, H).bfloat16()
    strided = torch.empty(C, V).view(torch.bfloat16)[:, :V]
    head.hidden_grad(strided, w, torch.empty(C, H))
    head.weight_grad(strided, h, torch.empty(V, H), False)
    head.logits(h, w[:37], torch.empty(C, 37))  # rows that are not 16-byte aligned
    assert taken == ["hidden_grad", "weight_grad", "logits"]


def test_the_gpu_head_is_transformer_engine_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for gemm, kind in ((general_gemm, "Transformer Engine's general_gemm"), (None, "torch.mm")):
        monkeypatch.setattr(transformer_engine, "general_gemm", lambda gemm=gemm: gemm)
        assert f"by {kind}" in heads._bf16_products("cuda", False).name


class CudaProducts:
    """torch as `heads` sees it, with the CUDA overloads of mm and addmm that CPU has not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def mm(
        a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype, out: torch.Tensor
    ) -> torch.Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        assert out.dtype == out_dtype
        return out.copy_(a.float() @ b.float())

    @staticmethod
    def addmm(
        c: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out_dtype: torch.dtype,
        out: torch.Tensor,
    ) -> torch.Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        assert c.dtype == out.dtype == out_dtype
        return out.copy_(c + a.float() @ b.float())


@pytest.mark.parametrize("V", [1000, 1003])
@pytest.mark.parametrize("engine", [True, False])
def test_the_fused_loss_drives_the_gpu_heads_rightly(
    head: heads.HeadProducts, monkeypatch: pytest.MonkeyPatch, engine: bool, V: int
) -> None:
    load()
    monkeypatch.setattr(heads, "torch", CudaProducts())
    monkeypatch.setattr(heads, "_addmm_takes_fp32", lambda: True)
    chosen = head if engine else heads.CUDA_TORCH
    monkeypatch.setattr(heads, "select", lambda *_: (chosen, torch.bfloat16))
    case = linear_case(50, 64, V, vocabulary=V - 3)
    leaf = leaves(case, main_grad=True)
    got, weight_grad_VH = run(case, leaf, chunk_bytes=4 * (V + 64) * 16, loss_scale=1.0)
    assert largest(got.logprobs_T, case.truth.logprobs_T) < 1e-5
    assert relative(weight_grad_VH, case.truth.weight_grad_VH) < 3e-3
    assert leaf[0].grad is not None
    assert relative(leaf[0].grad, case.truth.hidden_grad_TH) < 4e-3
