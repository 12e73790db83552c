"""Generator ranks in another environment: the interpreter, its arguments and variables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import launch
from megatron_rl.config import ConfigError, load_config

ROOT = Path(__file__).resolve().parents[2]
YAML = ROOT / "examples" / "scalerl_tiny.yaml"


def other_python(folder: Path) -> Path:
    """Write an interpreter that prints how it was started."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv, os.getpid(), dict(os.environ)]))\n"
    )
    path.chmod(0o755)
    return path


def start(rank: int, *overrides: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "WORLD_SIZE": "3", "RANK": str(rank), **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.cli", "train", "--config", str(YAML), *overrides],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_generator_rank_becomes_the_other_interpreter_with_the_same_command(
    tmp_path, by_variable
):
    python = str(other_python(tmp_path))
    key = [] if by_variable else ["--roles.generator_python", python]
    variables = {launch.GENERATOR_PYTHON: python} if by_variable else {}
    process = start(2, *key, "--seed", "7", VIRTUAL_ENV="/left", **variables)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    arguments, pid, environment = json.loads(out)
    assert arguments == [python, "-m", "megatron_rl.cli", "train", "--config", str(YAML), *key,
                         "--seed", "7"]  # fmt: skip
    assert pid == process.pid
    assert environment["RANK"] == "2" and "VIRTUAL_ENV" not in environment


def test_tools_of_the_other_environment_are_found_first(monkeypatch, tmp_path):
    """Packages of vLLM ask for ninja by name, and say that FlashInfer is missing where it is."""
    python, seen = other_python(tmp_path), []
    for folder in (tmp_path, tmp_path / "trainer"):
        folder.mkdir(exist_ok=True)
        (folder / "ninja").write_text("#!/bin/sh\n")
        (folder / "ninja").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "trainer"))
    monkeypatch.setattr(os, "execve", lambda *a: seen.append(a[2]))
    config = load_config(YAML, ["--roles.generator_python", str(python)])
    launch.enter_generator_python(config, ["train"])
    assert shutil.which("ninja", path=seen[0]["PATH"]) == str(tmp_path / "ninja")
    assert seen[0]["PATH"].endswith(os.pathsep + str(tmp_path / "trainer"))


def test_the_interpreter_is_entered_once(monkeypatch, tmp_path):
    config = load_config(YAML, ["--roles.generator_python", str(other_python(tmp_path))])
    seen = []
    monkeypatch.setattr(os, "execve", lambda *a: seen.append(a))
    launch.enter_generator_python(config, ["train"])
    (_, arguments, environment), *rest = seen
    assert not rest and arguments[1:] == ["-m", "megatron_rl.cli", "train"]
    monkeypatch.setattr(os, "environ", environment)
    launch.enter_generator_python(config, ["train"])
    assert len(seen) == 1


def test_without_another_interpreter_the_process_is_not_replaced(monkeypatch):
    seen = []
    monkeypatch.delenv(launch.GENERATOR_PYTHON, raising=False)
    monkeypatch.setattr(os, "execve", lambda *a: seen.append(a))
    for key in ([], ["--roles.generator_python", sys.executable]):
        launch.enter_generator_python(load_config(YAML, key), ["train"])
    assert seen == []


def test_a_missing_interpreter_is_rejected_with_its_key(monkeypatch, tmp_path):
    config = load_config(YAML, ["--roles.generator_python", str(tmp_path / "nothing")])
    with pytest.raises(ConfigError, match=r"roles.generator_python is .*nothing: no executable"):
        launch.generator_python(config)
    monkeypatch.setenv(launch.GENERATOR_PYTHON, str(tmp_path))
    with pytest.raises(ConfigError, match=launch.GENERATOR_PYTHON):
        launch.generator_python(load_config(YAML, []))
