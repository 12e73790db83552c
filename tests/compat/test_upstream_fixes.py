"""Each upstream fault is there without its fix and gone with it: the reproductions show it.

A test that fails because the fault is gone without the fix means that upstream has fixed it: end
the range `affected` of the fix there. `patches/` has the reproductions and diffs for upstream.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from megatron_rl.compat import import_hook, megatron_fixes, upstream, vllm_fixes
from megatron_rl.compat.upstream import ASSUME, UnsupportedVersionError, UpstreamFix
from tests.workers import TORCH

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
ALL = (*megatron_fixes.FIXES, *vllm_fixes.FIXES)
COMPILE, ADAM, EXPERTS, ROUTERS = megatron_fixes.FIXES
MOE, TIED, SEEDED = vllm_fixes.FIXES
MEGATRON = (
    "megatron.core.dist_checkpointing",
    "megatron.core.optimizer",
    "megatron.core.transformer.moe.moe_layer",
)
VLLM = (
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.layers.vocab_parallel_embedding",
    "vllm.model_executor.model_loader.reload",
)
"""What the reproductions import, which the fixes change."""

INSTALL = """
from megatron_rl.compat import megatron_fixes, upstream, vllm_fixes
upstream.install((*megatron_fixes.FIXES, *vllm_fixes.FIXES))
"""


def reproduction(fix: UpstreamFix) -> Path:
    return PATCHES / "reproduce" / f"{fix.name.replace('-', '_')}.py"


def reproduce(
    folder: Path, once: tuple[str, ...], twice: tuple[str, ...], *fixes: UpstreamFix
) -> tuple[dict[tuple[str, bool], int], str]:
    """Return ((name of a fix, installed) -> exit status of its reproduction) and the output."""
    scripts = {str(reproduction(fix)): fix.name for fix in fixes}
    (folder / "sitecustomize.py").write_text(INSTALL)
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    variables = {"OMP_NUM_THREADS": "1", "VLLM_PLUGINS": "", "PYTHONPATH": os.pathsep.join(paths)}
    log = folder / "log.txt"
    with log.open("wb") as output:  # not a pipe, which helper processes would hold open
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.compat.run_scripts", ",".join(once), ",".join(twice),
             str(folder), *scripts],
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | variables,
        )  # fmt: skip
        try:
            status = process.wait(280)
        finally:  # the helper processes outlive the scripts that started them
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
    text = log.read_text()
    assert status == 0, text[-4000:]
    rows = [line.split()[1:] for line in text.splitlines() if line.startswith("STATUS ")]
    statuses = {(scripts[script], fixed == "fixed"): int(code) for script, fixed, code in rows}
    assert len(statuses) == 2 * len(fixes), text[-4000:]
    assert set(statuses.values()) <= {0, 1}, text[-4000:]
    return statuses, text


def test_compile_helpers_uses_the_wheels_compiled_helpers():
    import megatron.core.datasets.utils as utils

    upstream.install([COMPILE])
    fixed = utils.compile_helpers
    with pytest.raises(SystemExit):
        fixed.__wrapped__()
    fixed()
    assert "megatron.core.datasets.helpers_cpp" in sys.modules


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Return the exit statuses, and the output."""
    import torch

    # CUDA bears no fork after its start.
    once, twice = (("os",), ()) if torch.cuda.is_available() else (TORCH, MEGATRON)
    return reproduce(tmp_path_factory.mktemp("megatron"), once, twice, ADAM, EXPERTS, ROUTERS)


def test_torch_adam_counts_right_after_a_load(megatron):
    statuses, text = megatron
    assert [statuses[ADAM.name, fixed] for fixed in (False, True)] == [1, 0], text[-4000:]
    for wrong in ("fp32 optimizer, 0", "distributed optimizer, 0", "distributed optimizer, 3"):
        assert text.count(f"{wrong} steps: right") == 1, wrong  # with the fix


def test_an_empty_shard_of_a_distributed_adam_counts_0_steps():
    import torch

    class Upstream:
        load_state_dict = _set_main_param_and_optimizer_states = None

        def __init__(self):
            self.optimizer = torch.optim.Adam([torch.zeros(0, requires_grad=True)])
            self.optimizer.param_groups[0]["params"] = []
            self.init_state_fn, self.config = (lambda *_: None), None

        def state_dict(self):
            steps = {s["step"].item() for s in self.optimizer.state_dict()["state"].values()}
            assert len(steps) == 1
            return steps.pop()

    cls = type("DistributedOptimizer", (Upstream,), {"state_dict": Upstream.state_dict})
    cls.load_state_dict = cls._set_main_param_and_optimizer_states = lambda self: None
    megatron_fixes._load_step_counts(types.SimpleNamespace(DistributedOptimizer=cls))
    optimizer = cls()
    with pytest.raises(AssertionError):
        Upstream.state_dict(optimizer)
    assert optimizer.state_dict() == 0.0
    assert not optimizer.optimizer.state


def test_gradients_of_replicated_experts_are_summed(megatron):
    statuses, text = megatron
    assert statuses[EXPERTS.name, True] == 0, text[-4000:]
    if not EXPERTS.state()[0]:
        pytest.skip(f"{EXPERTS.state()[1]} (make test-other-megatron)")
    assert statuses[EXPERTS.name, False] == 1, text[-4000:]


def test_padding_has_no_part_in_the_routers_losses(megatron):
    statuses, text = megatron
    assert [statuses[ROUTERS.name, fixed] for fixed in (False, True)] == [1, 0], text[-4000:]


@pytest.fixture(scope="module")
def vllm_statuses(tmp_path_factory):
    pytest.importorskip("vllm")
    return reproduce(tmp_path_factory.mktemp("vllm"), ("vllm.config",), VLLM, *vllm_fixes.FIXES)[0]


@pytest.mark.e2e
def test_experts_are_packed_again_on_a_weight_update(vllm_statuses):
    assert [vllm_statuses[MOE.name, fixed] for fixed in (False, True)] == [1, 0]


@pytest.mark.e2e
def test_a_tied_head_is_packed_again_on_a_weight_update(vllm_statuses):
    assert [vllm_statuses[TIED.name, fixed] for fixed in (False, True)] == [1, 0]


@pytest.mark.e2e
def test_a_seeded_request_may_be_prefilled_in_parts(vllm_statuses):
    assert [vllm_statuses[SEEDED.name, fixed] for fixed in (False, True)] == [1, 0]


def test_the_installed_code_has_each_affected_fault():
    """Whatever is installed has the faulty text exactly where the fix expects it."""
    lacking = []
    for fix in ALL:
        needed, _ = fix.state()
        root = Path(str(importlib.metadata.distribution(fix.package).locate_file("")))
        for module, (evidence, _) in fix.changes.items():
            text = root.joinpath(*module.split(".")).with_suffix(".py").read_text()
            if needed and evidence not in text:
                lacking.append((fix.name, module))
    assert lacking == [], "upstream, or someone in this environment, has changed the code"


def test_each_fix_has_a_diff_and_a_reproduction_and_is_in_the_readme():
    readme = (PATCHES / "README.md").read_text()
    for fix in ALL:
        files = (PATCHES / f"{fix.name}.patch").read_text()
        assert all(module.replace(".", "/") in files for module in fix.changes), fix.name
        assert reproduction(fix).is_file() and fix.name in readme


FAULTY, CORRECT = "RATE = 1\n", "RATE = 2\n"


def install_package(folder: Path, monkeypatch, text: str, version: str = "1.1") -> UpstreamFix:
    """Return a fix of a package `faulty_NAME` that is made in `folder`."""
    name = f"faulty_{folder.name}".replace("-", "_")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv(ASSUME, raising=False)
    change = (FAULTY, lambda module: setattr(module, "RATE", 3))
    return UpstreamFix(name, name, ">=1.0,<1.5", "a wrong rate", {name: change}, fixed_in="1.4")


def test_a_module_is_changed_before_its_importer_sees_it_and_once(tmp_path, monkeypatch):
    fix = install_package(tmp_path, monkeypatch, FAULTY)
    upstream.install([fix])
    upstream.install([fix])
    assert sum(changes[1] == fix.apply for changes in import_hook._CHANGES) == 1
    assert importlib.import_module(fix.name).RATE == 3
    assert fix.state() == (True, f"{fix.name} 1.1: fixed at import")


def test_a_module_that_is_imported_already_is_changed_now(tmp_path, monkeypatch):
    fix = install_package(tmp_path, monkeypatch, FAULTY)
    module = importlib.import_module(fix.name)
    upstream.install([fix])
    assert module.RATE == 3


@pytest.mark.parametrize(
    ("text", "version", "variable"),
    [(CORRECT, "1.1", ""), (CORRECT, "1.4", ""), (CORRECT, "9.9", ""), (FAULTY, "0.1", "assumed")],
)
def test_code_without_the_fault_is_left_alone(tmp_path, monkeypatch, text, version, variable):
    fix = install_package(tmp_path, monkeypatch, text, version)
    monkeypatch.setenv(ASSUME, f"other, {fix.name}" if variable else "")
    upstream.check([fix])
    upstream.install([fix])
    rate = importlib.import_module(fix.name).RATE
    assert rate == int(text[-2])


def test_a_release_that_is_fixed_by_its_number_and_not_by_its_text_stops(tmp_path, monkeypatch):
    fix = install_package(tmp_path, monkeypatch, FAULTY, "1.6")
    upstream.check([fix])  # which reads no module
    upstream.install([fix])
    with pytest.raises(UnsupportedVersionError, match=r"1\.6 may have a fault"):
        importlib.import_module(fix.name)


def test_an_unknown_release_stops_the_check_and_the_import(tmp_path, monkeypatch):
    fix = install_package(tmp_path, monkeypatch, FAULTY, "0.9")
    for use in (upstream.check, lambda f: (upstream.install(f), importlib.import_module(fix.name))):
        with pytest.raises(UnsupportedVersionError) as e:
            use([fix])
        for text in (f"{fix.name} 0.9", "a wrong rate", ">=1.0,<1.5", f"{ASSUME}={fix.name}"):
            assert text in str(e.value)


def test_a_fix_is_not_needed_without_the_package_or_where_other_code_stands_in():
    fix = UpstreamFix("a", "no-such-package", ">=1", "", {})
    assert fix.state() == (False, "no-such-package is not installed")
    fix = UpstreamFix("a", "pytest", ">=1000", "", {}, unless_importable=("nothing", "json"))
    assert fix.state()[1].endswith("unused with nothing or json")


def test_a_generators_engine_refuses_an_unknown_vllm_and_other_engines_do_not(monkeypatch):
    pytest.importorskip("vllm")
    from megatron_rl.generator import vllm_plugin

    unknown = UpstreamFix("a", "pytest", ">=1000", "a fault", {})
    monkeypatch.setattr(vllm_fixes, "FIXES", (unknown,))
    monkeypatch.delenv(vllm_plugin.ENGINE_OWNER, raising=False)
    vllm_plugin.register()
    monkeypatch.setenv(vllm_plugin.ENGINE_OWNER, "1")
    with pytest.raises(UnsupportedVersionError, match="a fault"):
        vllm_plugin.register()
