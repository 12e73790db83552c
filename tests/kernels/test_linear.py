"""Fused head and loss against float64: values, gradients, chunks, types, Megatron's main_grad."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatron_rl.kernels import heads
from megatron_rl.kernels.fused import linear_loss
from megatron_rl.kernels.linear import CispoInputs
from megatron_rl.kernels.ops import fp32_linear
from tests.kernels.cases import largest, leaves, linear_case, relative, rows_of_memory, run
from tests.sums import sum_error

pytestmark = pytest.mark.usefixtures("cpu_kernel")

CASES = [
    pytest.param(37, 65, 7, {}, id="V=7 odd T, H"),
    pytest.param(61, 33, 1003, {"vocabulary": 1000}, id="V=1003 padded"),
    pytest.param(45, 64, 1003, {"temperature": 0.7}, id="V=1003 temperature"),
    pytest.param(97, 128, 32000, {}, id="V=32000"),
    pytest.param(33, 96, 202048, {"vocabulary": 202000}, id="V=202048 padded"),
]


@pytest.mark.parametrize("grads", ["bf16", "fp32"])
@pytest.mark.parametrize(("T", "H", "V", "kw"), CASES)
def test_bf16_operands_equal_float64(
    T: int, H: int, V: int, kw: dict[str, Any], grads: Any
) -> None:
    case = linear_case(T, H, V, **kw)
    truth = case.truth
    leaf = leaves(case, main_grad=True)
    got, weight_grad_VH = run(
        case, leaf, logit_grads=grads, chunk_bytes=rows_of_memory(case, 32), loss_scale=1.0
    )
    assert largest(got.logprobs_T, truth.logprobs_T) < 1e-5
    assert (got.logprobs_T <= 0).all()
    assert largest(got.entropy_T, truth.entropy_T) < 1e-5
    assert relative(got.ratio_T, truth.ratio_T) < 1e-5
    assert relative(got.coefficient_T, truth.coefficient_T) < 1e-5
    assert truth.loss_error(got.loss) < 1e-6
    assert weight_grad_VH.dtype == torch.float32
    if grads == "fp32":
        assert truth.weight_error(weight_grad_VH) < 2e-6
    else:
        assert relative(weight_grad_VH, truth.weight_grad_VH) < 3e-3
    # It is bf16 itself: its rounding costs up to 2^-8.
    assert leaf[0].grad is not None
    assert relative(leaf[0].grad, truth.hidden_grad_TH) < 4e-3
    if case.vocabulary < V:
        assert (weight_grad_VH[case.vocabulary :] == 0).all()


@pytest.mark.parametrize(("T", "H", "V", "kw"), CASES[:4])
def test_fp32_operands_equal_float64(T: int, H: int, V: int, kw: dict[str, Any]) -> None:
    case = linear_case(T, H, V, torch.float32, **kw)
    leaf = leaves(case)
    got, weight_grad_VH = run(case, leaf, chunk_bytes=rows_of_memory(case, 10))
    assert largest(got.logprobs_T, case.truth.logprobs_T) < 1e-5
    assert case.truth.loss_error(got.loss) < 1e-6
    assert case.truth.weight_error(weight_grad_VH) < 2e-6
    assert case.truth.hidden_error(leaf[0].grad) < 2e-6


def test_bf16_logits_are_worse_which_is_why_they_are_fp32() -> None:
    case = linear_case(64, 64, 1003)
    got, _ = run(case, leaves(case), precision="bf16")
    assert 1e-3 < largest(got.logprobs_T, case.truth.logprobs_T) < 0.2


@pytest.mark.parametrize("grads", ["bf16", "fp32"])
def test_chunk_size_does_not_matter_and_runs_repeat_bitwise(cpu_kernel: str, grads: Any) -> None:
    # fp32 gradients with fp32 operands: no rounding of the result hides a difference.
    case = linear_case(131, 64, 1003, torch.bfloat16 if grads == "bf16" else torch.float32)
    results = []
    for rows in (1, 7, 32, 96, 1000, 1000):
        leaf = leaves(case, main_grad=True)
        got, weight_grad_VH = run(
            case, leaf, logit_grads=grads, chunk_bytes=rows_of_memory(case, rows)
        )
        results.append((got, weight_grad_VH, leaf[0].grad))
    # The kinds for bf16 sum a row in one order in any chunk. torch's products may not, and then a
    # log-prob differs by some 2^-20, the rounding of logits up to 16. Where gradients are rounded
    # to bf16, a few of them are rounded to the other side for it, 2^-8 away.
    flips = grads == "bf16" and cpu_kernel == "generic"
    truth, last = case.truth, results[-1]
    for got, weight_grad_VH, hidden_grad_TH in results[:-1]:
        assert largest(got.logprobs_T, last[0].logprobs_T) < 1e-5
        assert truth.loss_error(got.loss, last[0].loss) < 1e-6
        tolerance = 3e-3 if flips else 2e-6
        assert sum_error(weight_grad_VH, last[1], truth.weight_terms_VH) < tolerance
        assert sum_error(hidden_grad_TH, last[2], truth.hidden_terms_TH) < tolerance
    assert all(torch.equal(a, b) for a, b in zip(results[-1][0], results[-2][0], strict=True))
    assert torch.equal(results[-1][1], results[-2][1])
    assert torch.equal(results[-1][2], results[-2][2])


@pytest.mark.parametrize("scale", [None, 1.0, 0.25])
def test_main_grad_is_added_to_in_fp32(scale: float | None) -> None:
    case = linear_case(50, 64, 203)
    hidden_TH, weight_VH = leaves(case, main_grad=True)
    weight: Any = weight_VH
    weight.main_grad.fill_(1.0)
    factor = 1.0 if scale is None else scale
    for _ in range(2):
        got = linear_loss(
            hidden_TH, weight_VH, case.targets_T, case.loss, logit_grads="fp32", loss_scale=scale
        )
        assert case.truth.loss_error(got.loss) < 1e-6
        (got.loss * factor).backward()
    want = 1.0 + 2 * factor * case.truth.weight_grad_VH
    assert relative(weight.main_grad - 1.0, want - 1.0) < 2e-5  # 1 + small numbers, in fp32
    assert weight.grad_added_to_main_grad
    assert hidden_TH.grad is not None
    assert relative(hidden_TH.grad, 2 * factor * case.truth.hidden_grad_TH) < 6e-3


def test_a_shared_embedding_gets_zeros_beside_main_grad() -> None:
    case = linear_case(20, 32, 67)
    hidden_TH, weight_VH = leaves(case, main_grad=True)
    weight: Any = weight_VH
    weight.zero_out_wgrad = True
    embedded = torch.nn.functional.embedding(case.targets_T, weight_VH)
    got = linear_loss(hidden_TH, weight_VH, case.targets_T, case.loss, loss_scale=1.0)
    (got.loss + embedded.float().sum()).backward()
    # Autograd delivers the embedding's share only; Megatron's hook adds it to main_grad.
    want = torch.zeros(67, 32).index_add_(0, case.targets_T, torch.ones(20, 32))
    assert torch.equal(weight_VH.grad.float(), want)  # type: ignore[union-attr]
    assert relative(weight.main_grad, case.truth.weight_grad_VH) < 3e-3


def test_a_broken_promise_about_the_loss_scale_is_an_error() -> None:
    case = linear_case(20, 32, 67)
    hidden_TH, weight_VH = leaves(case, main_grad=True)
    got = linear_loss(hidden_TH, weight_VH, case.targets_T, case.loss, loss_scale=1.0)
    with pytest.raises(RuntimeError, match="loss_scale"):
        (got.loss * 2).backward()


@pytest.mark.parametrize("hidden_only", [True, False])
def test_only_wanted_gradients_are_made(hidden_only: bool) -> None:
    case = linear_case(20, 32, 67)
    hidden_TH, weight_VH = leaves(case)
    (weight_VH if hidden_only else hidden_TH).requires_grad_(False)
    got = linear_loss(hidden_TH, weight_VH, case.targets_T, case.loss)
    got.loss.backward()
    wanted, other = (hidden_TH, weight_VH) if hidden_only else (weight_VH, hidden_TH)
    assert other.grad is None
    truth = case.truth.hidden_grad_TH if hidden_only else case.truth.weight_grad_VH
    assert relative(wanted.grad, truth) < 5e-3  # type: ignore[arg-type]


@pytest.mark.parametrize("native", [True, False])
def test_a_pass_without_gradients_leaves_main_grad_alone(native: bool) -> None:
    case = linear_case(20, 32, 67)
    hidden_TH, weight_VH = leaves(case, main_grad=True)
    weight: Any = weight_VH
    loss: Any = case.loss if native else lambda logprobs_C, place: -logprobs_C
    with torch.no_grad():
        got = linear_loss(hidden_TH, weight_VH, case.targets_T, loss, loss_scale=1.0)
    assert not got.loss.requires_grad
    assert (weight.main_grad == 0).all()
    assert not weight.grad_added_to_main_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_gradients_only_the_logits_are_multiplied(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    case = linear_case(20, 32, 67, dtype)

    def refuse(*_: object) -> None:
        raise AssertionError("a backward product without need")

    head, _ = heads.select("fp32", "auto", dtype, "cpu")
    monkeypatch.setattr(type(head), "hidden_grad", refuse)
    monkeypatch.setattr(type(head), "weight_grad", refuse)
    with torch.no_grad():
        got = linear_loss(*leaves(case), case.targets_T, case.loss)
    assert case.truth.loss_error(got.loss) < 1e-6
    assert largest(got.logprobs_T, case.truth.logprobs_T) < 1e-5
    assert not got.loss.requires_grad


def test_no_tokens_give_zeros_and_still_a_graph() -> None:
    case = linear_case(4, 32, 67)
    none = slice(0, 0)
    for scale in (None, 1.0):
        hidden_TH, weight_VH = leaves(case, main_grad=scale is not None)
        empty = CispoInputs(*case.loss.of(none))
        got = linear_loss(hidden_TH[none], weight_VH, case.targets_T[none], empty, loss_scale=scale)
        got.loss.backward()
        assert got.loss == 0
        grad = weight_VH.grad if scale is None else weight_VH.main_grad  # type: ignore[attr-defined]
        assert (grad == 0).all()
        assert (hidden_TH.grad == 0).all()  # type: ignore[union-attr]


def test_the_plain_head_gives_the_same_logits_and_gradients() -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 5e-3)):
        case = linear_case(30, 40, 77, dtype)
        hidden_TH, weight_VH = leaves(case)
        logits_TV = fp32_linear(hidden_TH, weight_VH)
        assert logits_TV.dtype == torch.float32
        want_TV = case.hidden_TH.double() @ case.weight_VH.double().T
        assert relative(logits_TV, want_TV) < 1e-6
        (logits_TV * case.truth.logit_grads_TV.float()).sum().backward()
        assert relative(weight_VH.grad, case.truth.weight_grad_VH) < tolerance  # type: ignore[arg-type]
        assert relative(hidden_TH.grad, case.truth.hidden_grad_TH) < tolerance  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_VH": torch.zeros(67, 31, dtype=torch.bfloat16)}, "width must agree"),
        ({"hidden_TH": torch.zeros(4, 32)}, "type and width must agree"),
        ({"targets_T": torch.zeros(3, dtype=torch.int64)}, "int64"),
        ({"targets_T": torch.zeros(4, dtype=torch.int32)}, "int64"),
        ({"temperature": 0.0}, "temperature"),
        ({"vocabulary": 68}, "vocabulary"),
        ({"precision": "fp16"}, "precision"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    case = linear_case(4, 32, 67)
    arguments: dict[str, Any] = {
        "hidden_TH": case.hidden_TH,
        "weight_VH": case.weight_VH,
        "targets_T": case.targets_T,
        "loss": case.loss,
    }
    with pytest.raises(ValueError, match=message):
        linear_loss(**{**arguments, **change})


def test_the_choice_of_head_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    heads.select.cache_clear()
    case = linear_case(4, 32, 67)
    with caplog.at_level(logging.INFO, "megatron_rl.kernels"):
        for _ in range(2):
            run(case, leaves(case), precision="tf32")
    lines = [r.message for r in caplog.records if "LM head" in r.message]
    assert len(lines) == 1
    assert "tf32" in lines[0]
