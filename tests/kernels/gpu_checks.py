"""The checks of the kernels on a GPU; they need torch, nvcc and this repository only.

`python -m tests.kernels.gpu_checks` runs all of them without pytest; `--small` is one small case
for compute-sanitizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.kernels import cispo_reference
from megatron_rl.kernels.fused import linear_logprobs, linear_loss
from megatron_rl.kernels.library import load
from megatron_rl.kernels.linear import CispoInputs
from megatron_rl.kernels.ops import fp32_linear
from tests.kernels.cases import CAP, cispo_inputs, largest, linear_case, relative, truth_of_logits
from tests.sums import sum_error


def to_gpu(loss: CispoInputs) -> CispoInputs:
    return CispoInputs(
        loss.generator_logprobs_T.cuda(),
        loss.advantages_T.cuda(),
        loss.weights_T.cuda(),
        loss.max_ratio,
    )


def kernels_are_compiled_in() -> None:
    assert load().cuda, "the library was built without CUDA code"


def rows_equal_float64(sizes: tuple[int, ...] = (7, 1003, 32000, 202048)) -> None:
    load()
    for V in sizes:
        for bf16 in (False, True):
            C, columns = 11, max(V - 3, 1)
            x = torch.randn(C, V, generator=torch.Generator().manual_seed(V)) * 4
            y = torch.arange(C) * 7919 % columns
            loss = cispo_inputs(C, torch.full((C,), -3.0))
            want = truth_of_logits(x, y, loss, columns)
            for gap in (0, 5):  # float4 and scalar loads
                buffer = torch.full((C, V + gap), float("nan"), device="cuda")
                view = buffer[:, :V].copy_(x)
                inputs = to_gpu(loss).of(slice(None))
                out = torch.ops.megatron_rl.cispo_rows_(
                    view, y.cuda(), 0, columns, 1.0, *inputs, bf16
                ).cpu()
                assert largest(out[0], want.logprobs_T) < 1e-5
                assert largest(out[1], want.entropy_T) < 1e-5
                assert want.loss_error(out[4].double().sum()) < 2e-6
                got = buffer.view(torch.bfloat16)[:, :V] if bf16 else view
                got = got.cpu()
                assert relative(got, want.logit_grads_TV) < (4e-3 if bf16 else 2e-6)
                assert (got[:, columns:] == 0).all()


def rows_equal_the_reference_on_edges() -> None:
    load()
    C, V = 6, 5000
    x = torch.randn(C, V, device="cuda") * 3 + 1e4
    x[0, 10:4000] = float("-inf")
    y = torch.tensor([4, -100, V, 7, 8, V - 1], device="cuda")
    inputs = torch.full((C,), -3.0, device="cuda"), torch.ones(C, device="cuda")
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0], device="cuda")
    a, b = x.clone(), x.clone()
    got = torch.ops.megatron_rl.cispo_rows_(a, y, 0, V, 1.25, *inputs, weights, CAP, False)
    want = cispo_reference.cispo_rows_(b, y, 0, V, 1.25, *inputs, weights, CAP, False)
    assert torch.allclose(got, want, atol=1e-5, rtol=1e-4)
    assert relative(a, b) < 5e-6
    half = V // 2
    stats = torch.stack(
        [
            torch.ops.megatron_rl.row_stats(x[:, :half], y, 0, half, 1.25),
            torch.ops.megatron_rl.row_stats(x[:, half:], y, half, half, 1.25),
        ]
    )
    merged = torch.ops.megatron_rl.merge_rows(stats, 1.25)
    assert torch.allclose(merged[:2], want[:2], atol=1e-5, rtol=1e-4)


def fused_loss_equals_float64(V: int = 32000, T: int = 97, H: int = 128) -> None:
    case = linear_case(T, H, V, vocabulary=V - 2)
    for grads in ("bf16", "fp32"):
        results = []
        for rows in (32, 32, 1000):
            h = case.hidden_TH.cuda().requires_grad_()
            w: Any = case.weight_VH.cuda().requires_grad_()
            w.main_grad = torch.zeros(w.shape, device="cuda")
            got = linear_loss(
                h,
                w,
                case.targets_T.cuda(),
                to_gpu(case.loss),
                vocabulary=case.vocabulary,
                logit_grads=grads,  # type: ignore[arg-type]
                chunk_bytes=rows * 4 * (V + 8),
                loss_scale=1.0,
            )
            got.loss.backward()
            results.append((got, h.grad, w.main_grad))
            assert largest(got.logprobs_T.cpu(), case.truth.logprobs_T) < 1e-5
            assert case.truth.loss_error(got.loss.cpu()) < 2e-6
            if grads == "fp32":
                assert case.truth.weight_error(w.main_grad.cpu()) < 2e-6
            else:
                assert relative(w.main_grad.cpu(), case.truth.weight_grad_VH) < 3e-3
            assert relative(h.grad.cpu(), case.truth.hidden_grad_TH) < 5e-3
        assert torch.equal(results[0][2], results[1][2]), "two runs differ"
        assert torch.equal(results[0][1], results[1][1]), "two runs differ"
        if grads == "fp32":  # in bf16, roundings may flip between chunks of other sizes
            terms_VH = case.truth.weight_terms_VH
            assert sum_error(results[2][2].cpu(), results[0][2].cpu(), terms_VH) < 2e-6


def two_passes_and_head_equal_float64() -> None:
    case = linear_case(40, 64, 1000)
    h, w = case.hidden_TH.cuda().requires_grad_(), case.weight_VH.cuda().requires_grad_()
    logprobs, entropy = linear_logprobs(h, w, case.targets_T.cuda())
    (logprobs * case.truth.coefficient_T.cuda().float()).sum().backward()
    assert largest(entropy.cpu(), case.truth.entropy_T) < 1e-5
    assert relative(w.grad.cpu(), case.truth.weight_grad_VH) < 5e-3  # type: ignore[union-attr]
    want = case.hidden_TH.double() @ case.weight_VH.double().T
    assert relative(fp32_linear(h, w).cpu(), want) < 1e-6


def compiled_equals_eager() -> None:
    case = linear_case(40, 64, 1000)
    arguments = (case.targets_T.cuda(), to_gpu(case.loss))
    grads = []
    for function in (linear_loss, torch.compile(linear_loss, fullgraph=True, backend="aot_eager")):
        h, w = case.hidden_TH.cuda().requires_grad_(), case.weight_VH.cuda().requires_grad_()
        function(h, w, *arguments).loss.backward()
        grads.append((h.grad, w.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


def another_stream_is_respected() -> None:
    case = linear_case(64, 64, 32000)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = linear_loss(
            case.hidden_TH.cuda(), case.weight_VH.cuda(), case.targets_T.cuda(), to_gpu(case.loss)
        )
    stream.synchronize()
    assert largest(got.logprobs_T.cpu(), case.truth.logprobs_T) < 1e-5


CHECKS: list[Callable[[], None]] = [
    kernels_are_compiled_in,
    rows_equal_float64,
    rows_equal_the_reference_on_edges,
    fused_loss_equals_float64,
    two_passes_and_head_equal_float64,
    compiled_equals_eager,
    another_stream_is_respected,
]


def main() -> None:
    if sys.argv[1:] == ["--small"]:
        rows_equal_float64((7, 1003, 4097))
        fused_loss_equals_float64(1000, 40, 64)
        return
    failed = 0
    for check in CHECKS:
        try:
            check()
            print(f"PASSED {check.__name__}", flush=True)
        except Exception as error:  # noqa: BLE001 - the other checks still run; the exit code tells
            failed += 1
            print(f"FAILED {check.__name__}: {type(error).__name__}: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
