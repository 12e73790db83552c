"""Each workaround is still needed by the installed Megatron-Core, and affects nothing else."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import torch

import megatron_rl
from megatron_rl.compat import cpu_torch, import_hook, megatron_checkpoint, megatron_cpu
from megatron_rl.compat.megatron_workarounds import WORKAROUNDS
from tests.workers import TORCH, run_script


def source(module: str) -> str:
    """Return a module's source without importing it or its parents but `megatron`."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parents[2].joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text()


def test_each_workaround_is_still_needed() -> None:
    solved = [
        (module, change.__doc__)
        for module, (evidence, change) in WORKAROUNDS.items()
        if evidence not in source(module)
    ]
    assert solved == [], "upstream changed"


def test_the_changes_of_checkpoints_are_still_needed() -> None:
    for module, evidence in megatron_checkpoint.EVIDENCE.items():
        assert evidence in source(f"megatron.core.{module}"), "upstream changed"


def test_the_view_leaves_the_real_torch_alone() -> None:
    view = cpu_torch.view()
    assert view.zeros(2, device="cuda").device.type == "cpu"
    assert view.empty(2, device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
    assert view.cuda.current_device() == torch.device("cpu")
    assert view.cuda.get_rng_state().equal(torch.get_rng_state())
    # transformers relies on this: the factories know `meta`, and the context counts.
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


def test_install_is_inert_with_cuda_and_refuses_a_late_call(tmp_path: Path) -> None:
    code = """
import sys, types, torch
from megatron_rl.compat import megatron_cpu
module = types.ModuleType("megatron.core.jit"); module.torch = torch
torch.cuda.is_available = lambda: True
megatron_cpu._change(module); assert module.torch is torch
torch.cuda.is_available = lambda: False
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
try: megatron_cpu.install()
except RuntimeError as e: assert "imported before megatron_rl" in str(e), e
else: raise SystemExit("a late call was accepted")
del sys.modules["megatron.core"]
megatron_cpu.install(); megatron_cpu.install()
assert sum(type(f).__name__ == "_Finder" for f in sys.meta_path) == 1
from megatron.core import jit
assert jit.torch is not torch and jit.torch.cuda.current_device() == torch.device("cpu")
assert torch.ones(1).cuda().device.type == "cpu"
"""
    status, output = run_script(code, tmp_path, TORCH)
    assert status == 0, output


def test_only_megatron_core_sees_the_view() -> None:
    finder = import_hook._Finder()
    assert finder.find_spec("megatron_rl.trainer") is None
    assert finder.find_spec("torch.cuda") is None
    assert import_hook.is_within("megatron.core.jit", megatron_cpu.PACKAGES)
    assert not import_hook.is_within("megatron.core_utils", megatron_cpu.PACKAGES)


def test_every_package_that_imports_megatron_installs_the_changes_first() -> None:
    root = Path(megatron_rl.__file__).parent
    lacking = []
    for path in root.rglob("*.py"):
        package = path.relative_to(root).parts[0]
        names = [
            name
            for node in ast.walk(ast.parse(path.read_text()))
            for name in _imported(node)
            if name.split(".")[0] == "megatron"
        ]
        if names and package != "compat":
            body = ast.parse((root / package / "__init__.py").read_text()).body
            lines = [ast.unparse(node) for node in body]
            if "compat.install()" not in lines:
                lacking.append(str(path.relative_to(root)))
    assert lacking == []


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""] if node.level == 0 else []
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_the_order_in_which_packages_are_imported_does_not_count() -> None:
    code = """
import sys
import megatron_rl.models
assert not {"torch", "megatron.core"} & set(sys.modules), "the hook is light"
import megatron_rl.models.attention, megatron_rl.megatron_plugin.data_iterator, megatron_rl.trainer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.tensor_parallel import random
import torch
assert torch.ones(1).cuda().device.type == "cpu"
assert random._get_cuda_rng_state().equal(torch.get_rng_state())
assert hasattr(FP32Optimizer.sharded_state_dict, "__wrapped__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
