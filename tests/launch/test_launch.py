import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import launch, train
from megatron_rl.config import ConfigError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
YAML = EXAMPLES / "scalerl_tiny.yaml"


class Replaced(Exception):
    """Stands for the process that execve would become."""


@pytest.fixture
def torchrun(monkeypatch):
    """Records what the process would be replaced by."""
    seen = {}

    def execve(path, arguments, environment):
        seen.update(arguments=arguments, environment=environment)
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(launch, "gpu_count", lambda: 0)
    for name in launch.TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return seen


def test_outside_torchrun_it_starts_the_ranks_that_the_configuration_needs(torchrun):
    with pytest.raises(Replaced):
        train.run("train", YAML, ["--schedule.steps", "40"])
    arguments = torchrun["arguments"]
    assert "--nproc-per-node=3" in arguments
    assert arguments[-5:] == ["train", "--config", str(YAML), "--schedule.steps", "40"]


def test_the_supervised_stage_alone_needs_the_trainer_ranks_only(torchrun):
    with pytest.raises(Replaced):
        train.run("sft", YAML, [])
    assert "--nproc-per-node=2" in torchrun["arguments"]


def test_under_a_torchrun_with_one_rank_it_starts_anew_without_the_old_ranks(torchrun, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "old")
    with pytest.raises(Replaced):
        train.run("train", YAML, [])
    left = set(torchrun["environment"])
    assert not left & set(launch.TORCHRUN_VARIABLES) and "TORCHELASTIC_RUN_ID" not in left


def test_another_number_of_ranks_is_refused_with_the_right_one(torchrun, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"started 4 ranks.*needs 3.*nproc-per-node = 3"):
        train.run("train", YAML, [])


def test_a_bad_configuration_ends_with_status_2_and_names_the_key():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", "train", "--schedule.stepz", "4"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "schedule.stepz: unknown key (value '4')" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_plan_starts_nothing_and_names_ranks_and_units():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", "train", "--config", str(YAML), "--plan"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for text in (
        "ranks 0-1",
        "16 prompts x 8 completions = 128 completions",
        "at most 8 steps",
        "96 held-out prompts x 16",
    ):
        assert text in done.stdout


def test_the_example_is_shell_and_python_at_once(tmp_path):
    script = EXAMPLES / "scalerl_tiny.sh"
    compile(script.read_text(), str(script), "exec")
    stub = tmp_path / "torchrun"
    stub.write_text('#!/bin/sh\necho "$@"\n')
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script), "--model", "tiny_dense"],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.stdout.split() == ["--nproc-per-node", "3", str(script), "--model", "tiny_dense"]


@pytest.mark.parametrize("name", ["scalerl_tiny.yaml", "scalerl_tiny_dense.yaml"])
def test_example_configurations_are_valid(name):
    from megatron_rl.config import load_config

    config = load_config(EXAMPLES / name)
    assert config.roles.world_size == 3
    assert config.parallel.tensor * config.parallel.expert == 2
