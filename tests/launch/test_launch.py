"""`megatron-rl train` and the example scripts: torchrun is started only when ranks are missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import launch, train
from megatron_rl.config import ConfigError, load_config
from megatron_rl.weights.store import remove_unused

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
YAML = EXAMPLES / "scalerl_tiny.yaml"


class Replaced(Exception):
    """Raised in place of execve."""


@pytest.fixture
def torchrun(monkeypatch):
    """Return the arguments and the environment of the process that would replace this one."""
    seen = {}

    def execve(path, arguments, environment):
        seen.update(arguments=arguments, environment=environment)
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for name in filter(launch.TORCHRUN_VARIABLES.fullmatch, list(os.environ)):
        monkeypatch.delenv(name)
    return seen


def test_outside_torchrun_the_command_starts_the_ranks_of_the_configuration(torchrun):
    with pytest.raises(Replaced):
        train.run("train", YAML, ["--schedule.steps", "40"])
    arguments = torchrun["arguments"]
    assert {"--nproc-per-node=3", "--max-restarts=3"} <= {*arguments}
    assert arguments[-5:] == ["train", "--config", str(YAML), "--schedule.steps", "40"]


def test_torchrun_starts_failed_ranks_again_as_often_as_the_configuration_says(torchrun):
    with pytest.raises(Replaced):
        train.run("train", YAML, ["--fleet.trainer_restarts", "7"])
    assert "--max-restarts=7" in torchrun["arguments"]


AGENT = """
import os, sys
from megatron_rl import launch
agent = "import sys; print(sys.argv[1], flush=True); sys.stdin.read()"
execve = os.execve
os.execve = lambda path, arguments, _: execve(
    path, [path, "-c", agent, *(a for a in arguments if a.startswith("--log-dir="))], os.environ
)
launch.exec_torchrun([], [], 0)
"""


def test_torchruns_folder_of_logs_is_removed_after_it_was_killed_and_not_before():
    pipe = subprocess.PIPE
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdin=pipe, stdout=pipe, text=True)
    folder = Path(agent.stdout.readline().strip().removeprefix("--log-dir="))
    try:
        (folder / "none_1").mkdir()
        remove_unused(folder.parent, folder.name)
        assert folder.is_dir()
    finally:
        agent.kill()
        agent.communicate()
    remove_unused(folder.parent, folder.name)
    assert not folder.exists()


def test_the_supervised_stage_needs_only_the_trainer_ranks(torchrun):
    with pytest.raises(Replaced):
        train.run("sft", YAML, [])
    assert "--nproc-per-node=2" in torchrun["arguments"]


def test_under_a_torchrun_with_one_rank_the_old_variables_are_removed(torchrun, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "old")
    with pytest.raises(Replaced):
        train.run("train", YAML, [])
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(
        torchrun["environment"]
    )


def test_a_wrong_number_of_ranks_is_rejected_with_the_right_one(torchrun, monkeypatch):
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


def test_the_plan_names_ranks_and_units():
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


def test_the_plan_shortens_a_long_list_of_evaluations(capsys):
    from megatron_rl.orchestrator.run_plan import print_plan

    print_plan(load_config(YAML, ["--schedule.steps=100000", "--evaluation.every_steps=5"]))
    shown = "".join(capsys.readouterr().out.replace("│", " ").split())
    assert "atsteps0,5,10,15,20,25,...,100000(20001evaluations)" in shown


def test_examples_run_by_bash_and_by_python_with_their_configuration_and_options(tmp_path):
    package = tmp_path / "megatron_rl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cli.py").write_text("def main(arguments):\n    print(*arguments)\n")
    scripts = sorted(EXAMPLES.glob("*.sh"))
    assert len(scripts) == 6
    for script in scripts:
        for interpreter in ("bash", sys.executable):
            done = subprocess.run(
                [interpreter, str(script), "--seed", "3"],
                capture_output=True, text=True, timeout=60,
                env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
            )  # fmt: skip
            config = str(script.with_suffix(".yaml"))
            expected = ["train", "--config", config, "--seed", "3"]
            assert done.stdout.split() == expected, done.stderr


def test_example_configurations_are_valid():
    for path in EXAMPLES.glob("*.yaml"):
        load_config(path)
    dense = load_config(YAML, ["--model", "tiny_dense", "--parallel.tensor", "2"])
    for config in (load_config(YAML), dense):
        assert config.roles.world_size == 3
        assert config.parallel.expert == 2
