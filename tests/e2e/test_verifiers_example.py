"""Twenty steps in an environment of the package `verifiers`, from its tasks to its rewards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_rl.config import LookupTask
from megatron_rl.data.lookup import demonstrations
from megatron_rl.data.prompt_format import BOS
from megatron_rl.metrics.rollouts import read_rollouts
from tests.e2e.processes import ROOT, finish, rows, start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 20
TASKS = "tasks.jsonl"
NAME = "tests.e2e.lookup_environment"
ADAPTER = "megatron_rl.rollouts.environments.verifiers_adapter"
GIVEN, PROMPT = 2, 3
SETTINGS = f"""
  --schedule.steps {STEPS} --schedule.prompts_per_step 6 --schedule.completions_per_prompt 4
  --sft.steps 200 --rollout.seconds 60 --rollout.workers 1
  --generation.concurrent_completions 24
  --evaluation.every_steps {STEPS} --evaluation.samples_per_prompt 1
  --metrics.logprob_check_every_steps 1 --metrics.terminal plain
""".split()


def write_inputs(folder: Path) -> Path:
    """Write rows for the supervised stage and the configuration; return the latter's path."""
    with (folder / "demonstrations.jsonl").open("w") as file:
        for prompt, response in demonstrations(LookupTask(), seed=0, count=2000, each=1):
            row = {"prompt": prompt.removeprefix(BOS), "response": response}
            file.write(json.dumps(row) + "\n")
    config = yaml.safe_load((ROOT / "examples" / "scalerl_tools_tiny.yaml").read_text())
    config["sft"]["source"] = str(folder / "demonstrations.jsonl")
    config["task"] = {
        "kind": "jsonl",
        "path": str(folder / TASKS),
        "rollout": "environment",
        "environment": f"verifiers:{NAME}",
        "tools": config["task"]["tools"],  # so that the tiny model's tokenizer has the words of one
        "heldout_prompts": 4,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_an_environment_of_verifiers_is_trained_with_its_tools_and_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    log, run, config = tmp_path / "log.txt", tmp_path / "run", write_inputs(tmp_path)
    with (tmp_path / TASKS).open("w") as file:
        subprocess.run([sys.executable, "-m", ADAPTER, NAME], stdout=file, check=True, timeout=60)
    command = [sys.executable, "-m", "megatron_rl.cli", "train", "--config", str(config)]
    finish(start([*command, *SETTINGS, "--output_dir", str(run)], log), log, seconds=400)

    steps = rows(run, "step")
    assert [row["step"] for row in steps] == list(range(STEPS))
    errors = [row["logprob_error_max"] for row in steps if "logprob_error_max" in row]
    assert errors and max(errors) < 1e-4
    assert not any(row.get("rollouts_failed") or row.get("rollouts_dropped") for row in steps)

    table = read_rollouts(run / "rollouts").to_pylist()
    ended = [row for row in table if row["kind"] == "train" and row["finish_reason"] == "stop"]
    rewards = {row["reward"] for row in ended}
    assert rewards == {-0.5, 0.0, 1.0}
    for row in ended:
        assert row["origins"][0] == PROMPT and row["completion"].startswith("<bos>")
        assert (row["reward"] == -0.5) == (GIVEN not in row["origins"])
        assert (row["reward"] == 1.0) == (row["verdict"] == "correct")
