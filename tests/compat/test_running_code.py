"""Checks, versions and fixes are of the code that runs: a clone in front of the wheel counts."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from megatron_rl.compat import megatron_cpu, megatron_fixes, running_code
from megatron_rl.compat.running_code import MEGATRON, Code, code_of
from megatron_rl.compat.upstream import UnsupportedVersionError, check
from tests.workers import run_script

WHEEL = importlib.metadata.version(MEGATRON)
PACKAGE_INFO = """
MAJOR = {0}
MINOR = {1}
PATCH = {2}
PRE_RELEASE = '{3}'
VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)
__shortversion__ = '.'.join(map(str, VERSION[:3]))
__version__ = '.'.join(map(str, VERSION[:3])) + ''.join(VERSION[3:])
raise SystemExit("a look at the version ran the clone")
"""
LAYERS = """
class ColumnParallelLinear:
    def __init__(self, config, is_expert):
        self.weight = type("Weight", (), {"allreduce": True})()
    def parameters(self):
        return [self.weight]
"""
FAULTY = "# allreduce: not (self.is_expert and self.expert_parallel)\n"
SCRIPT = """
import sys
from types import SimpleNamespace
from megatron_rl import compat
compat.install()
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
import megatron.training.arguments
sizes = SimpleNamespace(expert_tensor_parallel_size=1, tensor_model_parallel_size=2)
print("FIXED", not ColumnParallelLinear(sizes, is_expert=True).weight.allreduce)
"""


def clone(folder: Path, *version: object, layers: str = LAYERS) -> Path:
    """Make a clone of Megatron-LM with the modules that are looked at; its version is data."""
    core = folder / "megatron" / "core"
    (core / "tensor_parallel").mkdir(parents=True)
    (folder / "megatron" / "training").mkdir()
    (core / "package_info.py").write_text(PACKAGE_INFO.format(*version).rpartition("raise")[0])
    (core / "__init__.py").write_text("from megatron.core.package_info import __version__\n")
    (core / "tensor_parallel" / "__init__.py").touch()
    (core / "tensor_parallel" / "layers.py").write_text(layers)
    (folder / "megatron" / "training" / "__init__.py").touch()
    (folder / "megatron" / "training" / "arguments.py").touch()
    return folder


def run(script: str, folder: Path, *behind: Path) -> tuple[int, str]:
    """Run a script in its own process, with folders in front of the wheel: (exit code, output)."""
    path = f"import sys; sys.path[1:1] = {[str(f) for f in behind]}\n"
    return run_script(path + script, folder, ("torch",))


@pytest.fixture
def in_front(monkeypatch):
    """Return a function that puts a folder before the wheel, where Megatron is not imported."""

    def put(folder: Path) -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] == "megatron"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(str(folder))

    return put


def test_the_version_is_that_of_the_code_that_an_import_gets(tmp_path, in_front):
    assert code_of(MEGATRON) == (WHEEL, None)
    versions = {(0, 18, 2, ""): "0.18.2", (0, 20, 0, "rc1"): "0.20.0rc1", (1, 0, 0, ""): "1.0.0"}
    for number, (parts, text) in enumerate(versions.items()):
        folder = tmp_path / str(number)
        clone(folder, *parts)
        core = folder / "megatron" / "core"
        (core / "package_info.py").write_text(PACKAGE_INFO.format(*parts))
        (core / "__init__.py").write_text("raise SystemExit('a look at the version ran it')")
        in_front(folder)
        assert code_of(MEGATRON) == Code(text, core)
        assert str(core) in str(code_of(MEGATRON))
        assert running_code.versions()[MEGATRON] == text
    (core / "package_info.py").unlink()
    assert code_of(MEGATRON) == Code("0+unknown", core)
    with pytest.raises(UnsupportedVersionError, match="unknown"):
        check(megatron_fixes.FIXES)


def test_other_packages_need_an_installed_distribution_and_their_own_code_counts(
    tmp_path, monkeypatch
):
    assert code_of("no-such-package") is None
    assert code_of("pytest") == (pytest.__version__, None)
    monkeypatch.setitem(running_code.MODULES, "pytest", "pytest_in_front")
    assert code_of("pytest") is None, "its metadata are there, and no code"
    package = tmp_path / "pytest_in_front"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_version.py").write_text("version: str\n__version__ = version = '0.33.1+cpu'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert code_of("pytest") == Code("0.33.1+cpu", package)


def test_a_clone_gets_the_fix_that_its_own_file_needs(tmp_path):
    cases = {
        "old": ((0, 18, 2, ""), FAULTY + LAYERS, "FIXED True"),
        "fork": ((0, 18, 2, ""), LAYERS, "FIXED False"),
        "new": ((0, 19, 1, ""), LAYERS, "FIXED False"),
        # Its number says that it is fixed, its file that it is not.
        "mixed": ((0, 19, 1, ""), FAULTY + LAYERS, "0.19.1 (imported from {}/megatron/core) may"),
    }
    for name, (version, layers, want) in cases.items():
        folder = clone(tmp_path / name, *version, layers=layers)
        status, output = run(SCRIPT, folder)
        assert want.format(folder) in output, (name, output)
        assert (status == 0) == want.startswith("FIXED"), name
        line = f"megatron.core is imported from {folder}, not from "
        assert output.count(line) == 1 and f"megatron-core {WHEEL}" in output, name
        assert "megatron.training is" not in output, name


def test_one_line_says_where_other_code_comes_from_on_the_first_rank(tmp_path, monkeypatch):
    core, training = clone(tmp_path / "a", 0, 18, 2, ""), clone(tmp_path / "b", 0, 19, 1, "")
    (core / "megatron" / "training" / "arguments.py").unlink()
    (core / "megatron" / "training" / "__init__.py").unlink()
    (core / "megatron" / "training").rmdir()
    status, output = run(SCRIPT, core, training)
    line = f"megatron.training is imported from {training}, not from {core} (megatron-core 0.18.2)"
    assert status == 0 and output.count(line) == 1, output
    monkeypatch.setenv("RANK", "1")
    status, output = run(SCRIPT, core, training)
    assert "FIXED" in output and "is imported from" not in output


def test_the_cpu_stand_in_checks_the_release_that_runs(tmp_path, in_front):
    in_front(clone(tmp_path, 0, 17, 1, ""))
    with pytest.raises(UnsupportedVersionError, match=r"0\.17\.1 .*>=0\.18,<0\.20"):
        megatron_cpu._view.__wrapped__(False)


def test_the_train_command_refuses_a_clone_before_any_rank_starts(tmp_path):
    folder = clone(tmp_path / "clone", 0, 20, 0, "")
    script = f"from megatron_rl.cli import main; main(['train', '--output_dir', '{tmp_path}/out'])"
    status, output = run(script, folder)
    assert status == 2, output
    assert f"megatron-core 0.20.0 (imported from {folder}/megatron/core) may" in output
    assert "Traceback" not in output
