"""Each upstream fault is there without its patch and gone with it: the reproductions say so.

A "without" that fails means that upstream has mended the fault: drop the patch for that release.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.patching import Patch, State, load_patches, state_of
from tests.patching.overlay import overlay, texts

ROOT = Path(__file__).resolve().parents[2]
PATCHES = {patch.name: patch for patch in load_patches()}


def run(arguments: list[str], site: Path) -> tuple[int, str]:
    """Exit status and output of Python with the wheels on `site` first."""
    log = site / "log.txt"
    with log.open("wb") as output:  # not a pipe, which helper processes would hold open
        status = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=280, check=False,
            env=os.environ | {"PYTHONPATH": f"{site}:{ROOT}", "OMP_NUM_THREADS": "1"},
        ).returncode  # fmt: skip
    return status, log.read_text()


def statuses(folder: Path, module: str, patches: list[Patch], *, patched: bool) -> list[int]:
    """Exit status of each reproduction, run in forks of a process that imported `module`."""
    overlay(folder, patches, patched=patched)
    scripts = [str(patch.reproduction) for patch in patches]
    _, text = run(["-m", "tests.patching.run_scripts", module, *scripts], folder)
    found = [line.split()[1:] for line in text.splitlines() if line.startswith("STATUS ")]
    assert [script for script, _ in found] == scripts, text[-4000:]
    assert all(status in "01" for _, status in found), text[-4000:]
    return [int(status) for _, status in found]


@pytest.mark.parametrize("patched", [False, True])
def test_compile_helpers_accepts_the_wheels_compiled_helpers(patched, monkeypatch):
    (path, text), *_ = texts(PATCHES["megatron-core-compile-helpers"], patched=patched).items()
    site = Path(sys.modules["sysconfig"].get_paths()["purelib"])
    function = next(
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == "compile_helpers"
    )
    module = ast.Module([function], [])
    names = {"__file__": str(site / path), "log_single_rank": lambda *_: None, "logger": None}
    names["logging"] = type("logging", (), {"ERROR": 40})
    # Only the name is imported; the package behind it takes seconds.
    fake = type(sys)("megatron.core.datasets")
    fake.helpers_cpp = object()
    monkeypatch.setitem(sys.modules, "megatron.core.datasets", fake)
    exec(compile(module, path, "exec"), names)
    if patched:
        names["compile_helpers"]()
    else:
        with pytest.raises(SystemExit):
            names["compile_helpers"]()


@pytest.mark.parametrize("patched", [False, True])
def test_torch_adam_counts_right_after_a_load(patched, tmp_path):
    patch = PATCHES["megatron-core-torch-adam-checkpoint"]
    overlay(tmp_path, [patch], patched=patched)
    status, text = run([str(patch.reproduction)], tmp_path)
    assert status == int(not patched), text[-4000:]
    if not patched:
        assert "fp32 optimizer, 0 steps: right" not in text
        assert "distributed optimizer, 0 steps: right" not in text
        assert "distributed optimizer, 3 steps: right" not in text


@pytest.mark.parametrize("patched", [False, True])
def test_gradients_of_replicated_experts_are_summed(patched, tmp_path):
    patch = PATCHES["megatron-core-expert-gradients"]
    if state_of(patch).state is State.MENDED:
        if not patched:
            pytest.skip("the installed Megatron-Core has mended it (make test-other-megatron)")
    else:
        overlay(tmp_path, [patch], patched=patched)
    status, text = run([str(patch.reproduction)], tmp_path)
    assert status == int(not patched), text[-4000:]


@pytest.fixture(scope="module", params=[False, True], ids=["unpatched", "patched"])
def vllm_faults(request, tmp_path_factory):
    """Whether the vLLM patches are in, and the exit status of both reproductions."""
    pytest.importorskip("vllm")
    patches = [PATCHES["vllm-cpu-moe-reload"], PATCHES["vllm-cpu-tied-head-reload"]]
    folder = tmp_path_factory.mktemp("vllm_overlay")
    return request.param, statuses(folder, "vllm.config", patches, patched=request.param)


@pytest.mark.e2e
def test_experts_are_packed_again_on_a_weight_update(vllm_faults):
    patched, (moe, _) = vllm_faults
    assert moe == int(not patched)


@pytest.mark.e2e
def test_a_tied_head_is_packed_again_on_a_weight_update(vllm_faults):
    patched, (_, tied) = vllm_faults
    assert tied == int(not patched)
