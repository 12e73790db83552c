"""Each mend is still called for by the installed Megatron-Core, and hurts nobody else."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch

from megatron_rl.compat import cpu_torch, megatron_checkpoint, megatron_cpu
from megatron_rl.compat.megatron_mends import MENDS, Mend


def source(module: str) -> str:
    """A module's source, found without importing it or its parents."""
    import importlib.metadata

    root = Path(str(importlib.metadata.distribution("megatron-core").locate_file("")))
    path = root.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text()


@pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.module)
def test_the_mend_is_still_needed(mend: Mend) -> None:
    assert mend.evidence in source(mend.module), f"upstream changed: is '{mend.reason}' solved?"


def test_the_checkpoint_queue_is_still_a_spawned_manager() -> None:
    module = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    assert megatron_checkpoint.EVIDENCE in source(module)


def test_the_view_leaves_the_real_torch_alone() -> None:
    view = cpu_torch.view()
    assert view.zeros(2, device="cuda").device.type == "cpu"
    assert view.empty(2, device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
    assert view.cuda.current_device() == torch.device("cpu")
    assert view.cuda.get_rng_state().equal(torch.get_rng_state())
    # What transformers relies on: the factories know `meta`, and the context is honoured.
    with torch.device("meta"):
        assert torch.arange(3).is_meta
        assert view.arange(3).is_meta
    assert torch.zeros is not view.zeros
    assert view.nn is torch.nn
    assert view.Tensor is torch.Tensor


def test_streams_and_events_are_always_done() -> None:
    cuda = cpu_torch.view().cuda
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        event = stream.record_event()
    assert event.query()
    assert event.elapsed_time(cuda.Event()) == 0.0


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_install_is_inert_with_cuda_and_refuses_other_releases_and_a_late_call() -> None:
    code = """
import importlib.metadata, sys, types, torch
from megatron_rl.compat import megatron_cpu
torch.cuda.is_available = lambda: True
megatron_cpu.install(); assert not megatron_cpu.installed()
torch.cuda.is_available = lambda: False
version, importlib.metadata.version = importlib.metadata.version, lambda name: "0.17.1"
try: megatron_cpu.install()
except RuntimeError as e: assert "0.17.1" in str(e) and "0.18.x, 0.19.x" in str(e), e
else: raise SystemExit("another release was accepted")
importlib.metadata.version = version
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
try: megatron_cpu.install()
except RuntimeError as e: assert "call install() first" in str(e), e
else: raise SystemExit("a late call was accepted")
del sys.modules["megatron.core"]
megatron_cpu.install(); megatron_cpu.install()
assert megatron_cpu.installed() and sum(type(f).__name__ == "_Finder" for f in sys.meta_path) == 1
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr


def test_only_megatron_core_sees_the_view() -> None:
    finder = megatron_cpu._Finder()
    assert finder.find_spec("megatron_rl.trainer") is None
    assert finder.find_spec("torch.cuda") is None
    assert PathFinder.find_spec("megatron_rl") is not None
