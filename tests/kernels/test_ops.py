"""The operators: opcheck, torch.compile, schemas, the choice of library and CPU kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.kernels import library
from megatron_rl.kernels.fused import linear_loss
from megatron_rl.kernels.ops import fp32_linear
from tests.kernels.cases import CAP, largest, linear_case, relative
from tests.workers import run_script


def arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator, by name."""
    g = torch.Generator().manual_seed(0)
    C, V, H = 5, 67, 32
    x, y = torch.randn(C, V, generator=g), torch.arange(C)
    gen, adv, w = -torch.rand(C), torch.randn(C, generator=g), torch.rand(C)
    h, weight = torch.randn(C, H).bfloat16(), torch.randn(V, H).bfloat16()
    grads = torch.randn(C, V).bfloat16()
    case = linear_case(C, H, V)
    leaf = (case.hidden_TH.requires_grad_(), case.weight_VH.requires_grad_())
    loss = case.loss
    cispo = (loss.generator_logprobs_T, loss.advantages_T, loss.weights_T, CAP)
    kind = library.CPU_KERNELS.index(library.cpu_kernel(library.load()))
    rows = {
        "row_stats": (x.clone(), y, 0, V, 1.0),
        "row_grads_": (x.clone(), y, 0, V, 1.0, x.amax(1), torch.ones(C), adv, False),
        "cispo_rows_": (x.clone(), y, 0, V, 1.0, gen, adv, w, CAP, True),
        "merge_rows": (torch.rand(2, 4, C) + 1.0, 1.0),
        "cispo_terms": (-torch.rand(C), gen, adv, w, CAP),
        "fp32_linear": (*leaf, "fp32", "auto"),
        "linear_cispo": (*leaf, y, *cispo, True, True, 1.0, V, "", "fp32", "auto", None),
        "scaled": (torch.randn(9, 3), torch.tensor(0.5), torch.bfloat16),
        "fp32_linear_backward": (torch.randn(C, V), h, weight, "fp32", "auto"),
    }
    if kind:
        rows["bf16_logits_"] = (h, weight, torch.empty(C, V), kind)
        rows["bf16_hidden_grad_"] = (grads, weight, torch.empty(C, H), kind)
        rows["bf16_weight_grad_"] = (grads, h, torch.empty(V, H), False, kind)
    return rows


def test_every_operator_passes_opcheck(cpu_kernel: str) -> None:
    given = arguments()
    names = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("megatron_rl::")}
    registered = {n.removeprefix("megatron_rl::") for n in names}
    if cpu_kernel == "generic":
        registered -= set(library.GEMMS)  # not used, and not runnable on every processor
    assert set(given) == registered
    for name, args in given.items():
        torch.library.opcheck(getattr(torch.ops.megatron_rl, name).default, args)


def test_library_and_reference_have_the_same_schemas() -> None:
    assert library.load().path is not None
    for name, schema in library.SCHEMAS.items():
        op = getattr(torch.ops.megatron_rl, name).default
        parsed = torch._C.parse_schema(f"megatron_rl::{name}{schema}")
        assert str(op._schema) == str(parsed)


def test_a_forced_cpu_kernel_is_used_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, name = library.load(), "MEGATRON_RL_CPU_KERNEL"
    for kind in library.CPU_KERNELS:
        monkeypatch.setenv(name, kind)
        if kind in loaded.cpu_kernels:
            assert library.cpu_kernel(loaded) == kind
            continue
        with pytest.raises(ValueError, match=f"{name} is '{kind}': this processor runs generic"):
            library.cpu_kernel(loaded)
    monkeypatch.setenv(name, "amx")
    with pytest.raises(ValueError, match=r"'amx': the torch reference .* runs generic only"):
        library.cpu_kernel(library.REFERENCE)
    monkeypatch.setenv(name, "")
    assert library.cpu_kernel(loaded) == loaded.cpu_kernel


def test_loss_and_head_compile_as_one_graph(cpu_kernel: str) -> None:
    case = linear_case(23, 32, 67)

    def step(hidden_TH: Any, weight_VH: Any) -> Any:
        hidden_TH = hidden_TH * 1.0
        got = linear_loss(hidden_TH, weight_VH, case.targets_T, case.loss)
        return got.loss * 2, got.logprobs_T, fp32_linear(hidden_TH, weight_VH).sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        hidden_TH = case.hidden_TH.clone().requires_grad_()
        weight_VH = case.weight_VH.clone().requires_grad_()
        loss, logprobs_T, total = function(hidden_TH, weight_VH)
        (loss + total * 0).backward()
        results.append((loss, logprobs_T, hidden_TH.grad, weight_VH.grad))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    assert largest(results[1][1], case.truth.logprobs_T) < 1e-5
    assert relative(results[1][3], 2 * case.truth.weight_grad_VH) < 5e-3


FALLBACK = """
import logging
logging.basicConfig(level=logging.WARNING, format="LOG %(message)s")
import torch
from tests.kernels.cases import largest, linear_case, relative
from megatron_rl.kernels.fused import linear_loss
from megatron_rl.kernels.library import load
case = linear_case(20, 32, 67)
hidden_TH, weight_VH = case.hidden_TH.requires_grad_(), case.weight_VH.requires_grad_()
for _ in range(2):
    hidden_TH.grad = weight_VH.grad = None
    got = linear_loss(hidden_TH, weight_VH, case.targets_T, case.loss)
    got.loss.backward()
assert load().path is None
assert largest(got.logprobs_T, case.truth.logprobs_T) < 1e-5
assert relative(weight_VH.grad, case.truth.weight_grad_VH) < 5e-3
print("SAME")
"""
OPCHECK = """
x = torch.randn(3, 9)
torch.library.opcheck(torch.ops.megatron_rl.row_stats.default, (x, torch.arange(3), 0, 9, 1.0))
"""


NOT_INSTALLED = """
from pathlib import Path
from megatron_rl.kernels import build
build.INSTALLED = Path("nowhere")
"""


def test_the_fallback_is_named_once_and_a_wrong_choice_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(code: str, **change: str) -> tuple[int, str]:
        """Return (exit code, output) of a program in a fork that has imported torch alone."""
        with monkeypatch.context() as patch:
            for name in ("MEGATRON_RL_KERNELS", "MEGATRON_RL_CPU_KERNEL"):
                patch.delenv(name, raising=False)
            for name, value in change.items():
                patch.setenv(name, value)
            return run_script(code, tmp_path, ("torch",), 250)

    cache = {"MEGATRON_RL_CACHE": str(tmp_path)}
    for named, (status, output) in {
        "no-such-compiler is not on PATH": run(
            NOT_INSTALLED + FALLBACK, CXX="no-such-compiler", **cache
        ),
        "MEGATRON_RL_KERNELS=reference": run(FALLBACK + OPCHECK, MEGATRON_RL_KERNELS="reference"),
    }.items():
        assert status == 0, output
        assert "SAME" in output.splitlines()
        lines = [line for line in output.splitlines() if line.startswith("LOG kernels run as")]
        assert len(lines) == 1
        assert named in lines[0]
    load = "from megatron_rl.kernels.library import load; load()"
    for named, (status, output) in {
        "no.so": run(load, MEGATRON_RL_KERNELS=str(tmp_path / "no.so")),
        "MEGATRON_RL_CPU_KERNEL is 'sse': the kinds are generic, avx512_bf16, amx": run(
            load, MEGATRON_RL_CPU_KERNEL="sse"
        ),
    }.items():
        assert status != 0
        assert named in output
