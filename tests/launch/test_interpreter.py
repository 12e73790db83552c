"""Generators in another environment: the interpreter of their processes, and its variables."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl import launch
from megatron_rl.config import ConfigError, RunConfig, load_config

ROOT = Path(__file__).resolve().parents[2]
YAML = ROOT / "examples" / "scalerl_tiny.yaml"


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return (interpreter, environment) of each generator rank that is started."""
    seen: list[Any] = []
    monkeypatch.setattr(launch, "supervise", lambda config, rank, store, *of: seen.append(of))
    monkeypatch.delenv(launch.GENERATOR_PYTHON, raising=False)
    return seen


def other_python(folder: Path) -> str:
    """Write an executable file that stands for an interpreter."""
    path = folder / "python"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def config_with(python: str) -> RunConfig:
    return load_config(YAML, ["--roles.generator_python", python])


@pytest.mark.parametrize("by_variable", [False, True])
def test_the_engines_of_generator_ranks_run_in_the_other_interpreter(
    tmp_path, monkeypatch, supervised, by_variable
):
    python, config = other_python(tmp_path), load_config(YAML)
    if by_variable:
        monkeypatch.setenv(launch.GENERATOR_PYTHON, python)
    else:
        config = config_with(python)
    monkeypatch.setenv("VIRTUAL_ENV", "/left")
    monkeypatch.setenv("RANK", "2")
    launch.run_generator_rank(config, 2, None)
    ((interpreter, environment),) = supervised
    assert interpreter == python
    assert environment["RANK"] == "2" and "VIRTUAL_ENV" not in environment


def test_tools_of_the_other_environment_are_found_first(monkeypatch, tmp_path, supervised):
    """Packages of vLLM ask for ninja by name, and say that FlashInfer is missing where it is."""
    python = other_python(tmp_path)
    for folder in (tmp_path, tmp_path / "trainer"):
        folder.mkdir(exist_ok=True)
        (folder / "ninja").write_text("#!/bin/sh\n")
        (folder / "ninja").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "trainer"))
    launch.run_generator_rank(config_with(python), 2, None)
    path = supervised[0][1]["PATH"]
    assert shutil.which("ninja", path=path) == str(tmp_path / "ninja")
    assert path.endswith(os.pathsep + str(tmp_path / "trainer"))


def test_without_another_interpreter_the_environment_is_the_ranks(monkeypatch, supervised):
    monkeypatch.setenv("VIRTUAL_ENV", "/kept")
    for config in (load_config(YAML), config_with(sys.executable)):
        launch.run_generator_rank(config, 2, None)
    assert supervised == [(sys.executable, dict(os.environ))] * 2


def test_a_missing_interpreter_is_rejected_with_its_key(monkeypatch, tmp_path):
    config = config_with(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"roles.generator_python is .*nothing: no executable"):
        launch.generator_python(config)
    monkeypatch.setenv(launch.GENERATOR_PYTHON, str(tmp_path))
    with pytest.raises(ConfigError, match=launch.GENERATOR_PYTHON):
        launch.generator_python(load_config(YAML, []))
