"""The trainer on Transformer Engine's layers equals the trainer on Megatron's local ones, in fp32.

Stand-ins with the signatures of 2.10 and 2.20 take its place on CPU: its kernels, FP8 and tensor
parallelism are not exercised.
"""

from __future__ import annotations

import sys
from os import environ
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config import Parallel
from megatron_rl.config.sections import Precision
from megatron_rl.kernels import transformer_engine
from megatron_rl.trainer import gpu_setup, megatron_build
from tests import te_stand_in
from tests.sums import sum_error
from tests.trainer.cases import write_model
from tests.trainer.te_worker import MODELS
from tests.workers import TORCH, run_ranks, run_script


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what both releases gave, by case: the local layers, Transformer Engine's."""
    folder = tmp_path_factory.mktemp("engines")
    for name, (tiny, changes) in MODELS.items():
        write_model(folder / name, tiny, **changes)
    run_ranks("tests.trainer.te_worker", 2, folder, 280, preloaded=TORCH)
    return [torch.load(folder / f"seen{rank}.pt") for rank in (0, 1)]


@pytest.mark.timeout(300)
def test_log_probs_and_gradients_equal_those_of_the_local_layers(seen: Any) -> None:
    for release in seen:
        for name, (local, engine) in release.items():
            assert engine["names"] == local["names"], name
            torch.testing.assert_close(
                engine["logprobs"], local["logprobs"], atol=5e-6, rtol=0, msg=name
            )
            for key, gradient in local["gradients"].items():
                assert sum_error(engine["gradients"][key], gradient, gradient) < 2e-5, (name, key)


def test_every_row_is_attended_as_thd(seen: Any) -> None:
    for release in seen:
        for name, (local, engine) in release.items():
            assert local["attended"] == [], name
            assert len(engine["attended"]) >= engine["micro-batches"], name
        assert set(release["dense, rows of one sequence"][1]["attended"]) == {1}


def test_all_that_can_be_fused_is_fused(seen: Any) -> None:
    for release in seen:
        assert release["dense"][1]["calls"] == {"weight gradient", "rope"}
        assert release["qwen3 moe"][1]["calls"] == {"weight gradient", "rope", "permute"}
        interleaved = {"weight gradient", "interleaved rope", "permute"}
        assert release["chunked scout"][1]["calls"] == interleaved


def test_layers_neither_read_from_the_device_nor_copy_to_it(seen: Any) -> None:
    for release in seen:
        for name, (_, engine) in release.items():
            # Positions and bounds; with chunks, those of two kinds of layers.
            kinds = 3 if "chunked" in name else 2
            assert engine["copies"] == kinds * engine["micro-batches"], name
        shallow, deep = release["dense"][1], release["deep dense"][1]
        assert len(deep["attended"]) == 2 * len(shallow["attended"])
        assert deep["reads"] == shallow["reads"]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """CUDA counts as available to `kernels.transformer_engine` and `gpu_setup`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "NVIDIA_TF32_OVERRIDE",
    ):
        monkeypatch.setenv(name, "")  # removed again after the test, whoever sets it
        monkeypatch.delenv(name)
    transformer_engine.general_gemm.cache_clear()
    monkeypatch.setattr(
        transformer_engine, "general_gemm", transformer_engine.general_gemm.__wrapped__
    )
    return monkeypatch


def put(monkeypatch: pytest.MonkeyPatch, gemm: Any = te_stand_in.general_gemm) -> None:
    """Install the package in this process, with this product."""
    modules = te_stand_in.modules(te_stand_in.NEW)
    modules["transformer_engine.pytorch.cpp_extensions"].general_gemm = gemm
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def write_broken(folder: Path, error: Exception) -> None:
    """Write a package that raises on import, as one of another torch or CUDA does."""
    package = folder / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(f"raise {type(error).__name__}({str(error)!r})")


SYMBOL = ImportError("undefined symbol: _ZN3c104cuda29c10_cuda_check_implementation")


@pytest.mark.parametrize(
    "error",
    [
        SYMBOL,
        OSError("libcudart.so.13: cannot open shared object file"),
        AssertionError("Transformer Engine package version mismatch"),
    ],
)
def test_one_that_does_not_load_is_named_with_cause_and_remedy(
    on_gpu: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    write_broken(tmp_path, error)
    on_gpu.syspath_prepend(tmp_path)
    try:
        with pytest.raises(RuntimeError) as raised:
            megatron_build.transformer_engine()
    finally:
        sys.modules.pop("transformer_engine", None)
    for part in (str(error), "another torch", "--no-build-isolation", "pip uninstall"):
        assert part in str(raised.value)


def test_a_rank_stops_at_it_before_megatron_is_imported(tmp_path: Path) -> None:
    write_broken(tmp_path, SYMBOL)
    code = """
import sys, torch
torch.cuda.is_available, torch.version.cuda = lambda: True, "13.0"
from megatron_rl.config import RunConfig
from megatron_rl.train import run_trainer_rank
try:
    run_trainer_rank(RunConfig(), 0, None, reinforce=False)
except RuntimeError as error:
    print("megatron" in sys.modules, error)
"""
    status, output = run_script(code, tmp_path, TORCH)
    assert status == 0, output
    lines = output.splitlines()
    stopped = "False Transformer Engine is installed and does not load (Import"
    assert any(line.startswith(stopped) for line in lines), output


def test_one_before_2_10_is_refused_by_its_signature(on_gpu: pytest.MonkeyPatch) -> None:
    put(on_gpu, te_stand_in.general_gemm_of_2_9)
    with pytest.raises(RuntimeError, match="workspace, as before 2.10"):
        megatron_build.transformer_engine()


def test_one_that_megatron_does_not_find_is_refused(on_gpu: pytest.MonkeyPatch) -> None:
    put(on_gpu)
    with pytest.raises(RuntimeError, match="this Megatron-Core does not find"):
        megatron_build.transformer_engine()


def test_neither_the_gpu_nor_the_package_alone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer_engine.general_gemm.cache_clear()
    assert not megatron_build.transformer_engine()
    put(monkeypatch)
    transformer_engine.general_gemm.cache_clear()
    assert not megatron_build.transformer_engine()


def test_variables_of_cuda_are_set_unless_they_are(on_gpu: pytest.MonkeyPatch) -> None:
    put(on_gpu)
    gpu_setup.prepare(Parallel(), Precision())
    assert environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environ
    gpu_setup.prepare(Parallel(tensor=2), Precision())
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"

    on_gpu.delenv("PYTORCH_ALLOC_CONF")
    on_gpu.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    on_gpu.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    gpu_setup.prepare(Parallel(context=2), Precision())
    assert "PYTORCH_ALLOC_CONF" not in environ
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_fp32_products_are_fp32_whatever_the_image_sets(on_gpu: pytest.MonkeyPatch) -> None:
    put(on_gpu)
    try:
        torch.set_float32_matmul_precision("high")  # TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
        torch.backends.cudnn.allow_tf32 = True
        gpu_setup.prepare(Parallel(), Precision(logits="tf32"))
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
        # The variable also forbids the TF32 products that a user has asked for.
        assert "NVIDIA_TF32_OVERRIDE" not in environ
        gpu_setup.prepare(Parallel(), Precision())
        assert environ["NVIDIA_TF32_OVERRIDE"] == "0"
    finally:
        torch.set_float32_matmul_precision("highest")
