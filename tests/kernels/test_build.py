"""The library and the CUDA code build here as they must, and load where they should."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernels_registers import registers
from megatron_rl.kernels import build, library

ROOT = Path(__file__).parents[2]
nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="no nvcc on PATH nor in CUDA_HOME")


@nvcc
def test_cuda_code_compiles_without_warnings_or_spills_for_three_architectures() -> None:
    reports = registers()  # warnings are errors
    assert {r.architecture for r in reports} == {"sm_80", "sm_90a", "sm_100"}
    kernels = {r.kernel for r in reports}
    assert kernels == {
        "stats_kernel",
        "merge_kernel",
        "terms_kernel",
        "cispo_kernel fp32",
        "cispo_kernel bf16",
        "grads_kernel fp32",
        "grads_kernel bf16",
    }
    assert len(reports) == 3 * len(kernels)
    for r in reports:
        assert r.spill_bytes == 0, r
        assert r.stack_bytes == 0, r
        # Four blocks of 512 threads share the 65,536 registers of a multiprocessor.
        assert r.registers <= 32, r


@nvcc
def test_a_library_with_cuda_inside_loads_and_runs_on_a_machine_without_gpu() -> None:
    path = build.find_or_build(cuda=True)
    needed = subprocess.run(
        ["readelf", "-d", str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert "[libtorch.so]" in needed
    assert "[libtorch_cpu.so]" in needed
    assert "cudart" not in needed, "the CUDA runtime must be linked statically"
    code = (
        "import torch\n"
        "from tests.kernels.cases import largest, linear_case\n"
        "from megatron_rl.kernels.fused import linear_loss\n"
        "from megatron_rl.kernels.library import load\n"
        "case = linear_case(20, 32, 67)\n"
        "got = linear_loss(case.hidden_TH, case.weight_VH, case.targets_T, case.loss)\n"
        "assert largest(got.logprobs_T, case.truth.logprobs_T) < 1e-5\n"
        "names = torch._C._dispatch_dump('megatron_rl::cispo_rows_')\n"
        "print(load().cuda, 'CUDA' in names)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MEGATRON_RL_KERNELS": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


def test_the_name_follows_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = build.library_name(False)
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    assert build.library_name(False) == before
    with (tmp_path / "csrc" / "row_math.h").open("a") as header:
        header.write("// changed\n")
    assert build.library_name(False) != before


def test_a_library_is_built_once_and_then_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Path] = []

    def pretend(out: Path, **_: object) -> Path:
        made.append(out)
        out.touch()
        return out

    monkeypatch.setenv("MEGATRON_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "build", pretend)
    monkeypatch.setattr(build, "INSTALLED", tmp_path)
    first = build.find_or_build(cuda=False)
    assert build.find_or_build(cuda=False) == first
    assert made == [first]
    # One with the CUDA code serves where none is asked for, not the other way round.
    assert build.find_or_build(cuda=True) != first
    assert len(made) == 2
    installed = tmp_path / first.name
    installed.touch()
    assert build.find_or_build(cuda=False) == installed


def test_a_compiler_error_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    (tmp_path / "csrc" / "library.cpp").write_text("int f() { return no_such_name; }\n")
    with pytest.raises(build.BuildError, match="no_such_name"):
        build.build(tmp_path / "out.so", cuda=False)
    assert not (tmp_path / "out.so").exists()
    assert build.build_for_install(tmp_path / "install") is None


def test_the_library_runs_under_another_torch() -> None:
    """`MEGATRON_RL_OTHER_TORCH`: folder with a torch of another version (pip install --target)."""
    other = os.environ.get("MEGATRON_RL_OTHER_TORCH")
    if other is None:
        pytest.skip(
            "MEGATRON_RL_OTHER_TORCH is not set: pip install --no-deps --target DIR torch==2.12.0"
        )
    path = library.load().path
    assert path is not None
    code = (
        "import torch\n"
        "from tests.kernels.cases import largest, linear_case, relative\n"
        "from tests.kernels.test_ops import arguments\n"
        "from megatron_rl.kernels.fused import linear_loss\n"
        "case = linear_case(37, 64, 1003)\n"
        "h, w = case.hidden_TH.requires_grad_(), case.weight_VH.requires_grad_()\n"
        "f = torch.compile(linear_loss, fullgraph=True, backend='aot_eager')\n"
        "for loss in (linear_loss, f):\n"
        "    h.grad = w.grad = None\n"
        "    got = loss(h, w, case.targets_T, case.loss)\n"
        "    got.loss.backward()\n"
        "    assert largest(got.logprobs_T, case.truth.logprobs_T) < 1e-5\n"
        "    assert relative(w.grad, case.truth.weight_grad_VH) < 5e-3\n"
        "for name, args in arguments().items():\n"
        "    torch.library.opcheck(getattr(torch.ops.megatron_rl, name).default, args)\n"
        "print(torch.__version__)\n"
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([other, str(ROOT)]),
        "MEGATRON_RL_KERNELS": str(path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    import torch

    assert done.stdout.strip() != torch.__version__
