"""Twenty steps of four tasks: tools, an agent, an environment of `verifiers`, one that fails.

The settings of `examples/scalerl_tools_tiny.sh`, with a mixture in place of its task. A start of a
run takes longer than its steps here, so one run shows all kinds of rollouts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from megatron_rl.config import CONFIG_FILE, LookupTask, load_config
from megatron_rl.data.lookup import demonstrations, lookup
from megatron_rl.data.prompt_format import BOS
from megatron_rl.messages import ORIGINS, Segment, turn_ranges
from megatron_rl.metrics.rollouts import read_rollouts
from megatron_rl.orchestrator.replay import recorded_batch
from megatron_rl.rewards import Outcome
from megatron_rl.rewards.task_verifiers import make_verifier
from megatron_rl.rewards.verifier_settings import VerifierSettings
from tests.e2e.faulty_environment import fails_always
from tests.e2e.processes import ROOT, finish, rows, start
from tests.trainer.cases import world_of_one

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS, LAG = 20, 3
LOOKUPS = "tests.e2e.lookup_environment"
FAULTY = "tests.e2e.faulty_environment:FaultyLookups"
DROPPED = "is dropped after the failures of rollout.attempts"
UNTHINKING = {"ended_thinking": False}
SETTINGS = f"""
  --schedule.steps {STEPS} --schedule.max_lag_steps {LAG}
  --schedule.prompts_per_step 12 --schedule.completions_per_prompt 4
  --sft.steps 200 --rollout.seconds 60 --rollout.environment_seconds 10
  --evaluation.every_steps {STEPS} --evaluation.samples_per_prompt 1
  --metrics.rollouts_ratios true --metrics.logprob_check_every_steps 1 --metrics.terminal plain
""".split()
SAMPLED, GIVEN, PROMPT = 0, 2, 3
Rows = list[dict[str, Any]]


def write_config(folder: Path) -> Path:
    """Write rows for the supervised stage and for `verifiers`; return the configuration's path."""
    with (folder / "demonstrations.jsonl").open("w") as file:
        for prompt, response in demonstrations(LookupTask(), seed=0, count=2000, each=1):
            row = {"prompt": prompt.removeprefix(BOS), "response": response}
            file.write(json.dumps(row) + "\n")
    adapter = "megatron_rl.rollouts.environments.verifiers_adapter"
    with (folder / "tasks.jsonl").open("w") as file:
        command = [sys.executable, "-m", adapter, LOOKUPS]
        subprocess.run(command, stdout=file, check=True, timeout=60)
    config = yaml.safe_load((ROOT / "examples" / "scalerl_tools_tiny.yaml").read_text())
    config["sft"]["source"] = str(folder / "demonstrations.jsonl")
    tools = config.pop("task") | {"heldout_prompts": 4}
    environment = {"rollout": "environment", "environment": f"verifiers:{LOOKUPS}"}
    of_package = {"kind": "jsonl", "path": str(folder / "tasks.jsonl"), "tools": tools["tools"]}
    config["tasks"] = {
        "tools": tools,
        "agent": tools | {"rollout": "agent", "agent": "tests.rollouts.agents:look_up"},
        "package": of_package | environment | {"heldout_prompts": 4},
        "faulty": tools | {"rollout": "environment", "environment": FAULTY},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollout_tasks")
    log = folder / "log.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        command = ["bash", "examples/scalerl_tools_tiny.sh", "--config", str(write_config(folder))]
        command += [*SETTINGS, "--output_dir", str(folder / "run")]
        finish(start(command, log), log, seconds=400)
    return folder / "run"


@pytest.fixture(scope="module")
def rollouts(run: Path) -> dict[str, Rows]:
    """Return the rows of training rollouts by task."""
    table = [row for row in read_rollouts(run / "rollouts").to_pylist() if row["kind"] == "train"]
    by_task = {task: [r for r in table if r["task"] == task] for task in {r["task"] for r in table}}
    assert by_task.keys() == {"tools", "agent", "package", "faulty"}
    return by_task


def test_every_step_is_trained_within_the_lag(run: Path) -> None:
    steps = rows(run, "step")
    assert [row["step"] for row in steps] == list(range(STEPS))
    assert max(row["lag_max"] for row in steps) <= LAG


def test_tools_are_called_and_their_results_are_given(rollouts: dict[str, Rows]) -> None:
    called = [row for row in rollouts["tools"] if GIVEN in row["origins"]]
    assert len(called) > len(rollouts["tools"]) / 10
    for row in called:
        text = row["completion"]
        first = row["prompt"].split(";")[1][:4]
        assert row["origins"][0] == PROMPT and text.startswith("<bos>")
        if f'"key": "{first}"' in text:
            assert f"<tool_response>{lookup(first)}</tool_response>" in text
    right = [row for row in rollouts["tools"] if row["verdict"] == "correct"]
    assert right and all(row["origins"].count(GIVEN) >= 2 * 6 for row in right)


def test_turns_are_of_several_weight_versions(rollouts: dict[str, Rows]) -> None:
    versions = [
        {v for v, o in zip(row["versions"], row["origins"], strict=True) if o == SAMPLED}
        for row in rollouts["tools"]
    ]
    assert any(len(one) > 1 for one in versions)


def test_an_agent_is_trained_through_the_endpoint(rollouts: dict[str, Rows]) -> None:
    several = [row for row in rollouts["agent"] if GIVEN in row["origins"]]
    assert several and all(row["origins"][0] == PROMPT for row in several)
    assert any(row["verdict"] == "correct" for row in several)
    assert any(row["trained"] for row in several)


def test_an_environment_of_verifiers_gives_tools_and_rewards(rollouts: dict[str, Rows]) -> None:
    ended = [row for row in rollouts["package"] if row["finish_reason"] == "stop"]
    assert {row["reward"] for row in ended} == {-0.5, 0.0, 1.0}
    assert any(row["trained"] for row in ended)
    for row in ended:
        assert row["origins"][0] == PROMPT and row["completion"].startswith("<bos>")
        assert (row["reward"] == -0.5) == (GIVEN not in row["origins"])
        assert (row["reward"] == 1.0) == (row["verdict"] == "correct")


def test_a_run_goes_on_when_an_environment_fails_in_every_way(
    run: Path, rollouts: dict[str, Rows]
) -> None:
    steps = rows(run, "step")
    failed = sum((Counter(row.get("rollouts_failed", {})) for row in steps), Counter())
    assert set(failed) == {"raised", "timed out", "flooded", "died"}
    assert sum(row.get("rollouts_dropped", 0) for row in steps) > 0
    assert any(row["trained"] for row in rollouts["faulty"])
    judge = make_verifier("math", VerifierSettings())
    for row in rollouts["faulty"]:  # no failure is a reward
        hops, key = row["prompt"].removeprefix("<bos>").rstrip("?").split(";")
        assert not fails_always(key)
        for _ in range(int(hops)):
            key = lookup(key)
        verdict = judge(row["completion"].rpartition("</tool_response>")[2], key, UNTHINKING)
        assert row["verdict"] == verdict.outcome
        assert row["reward"] == (1.0 if verdict.outcome is Outcome.CORRECT else -1.0)
    # The other environments and the agent never fail.
    dropped = [
        line for line in (run.parent / "log.txt").read_text().splitlines() if DROPPED in line
    ]
    assert dropped and all(FAULTY in line for line in dropped)


def test_no_worker_outlives_its_generator(run: Path) -> None:
    workers = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if "megatron_rl.rollouts.environments.episodes" in (process.info["cmdline"] or [])
    ]
    assert all(psutil.pid_exists(int(command[-1])) for command in workers)


def test_both_sides_agree_on_every_sampled_token_and_no_other_has_a_ratio(
    run: Path, rollouts: dict[str, Rows]
) -> None:
    errors = [row["logprob_error_max"] for row in rows(run, "step") if "logprob_error_max" in row]
    assert len(errors) > 5 and max(errors) < 1e-4
    for row in (row for of_task in rollouts.values() for row in of_task if row["trained"]):
        sampled = np.array(row["origins"]) == SAMPLED
        assert (np.isfinite(row["ratios"]) == sampled).all()
        assert (np.array(row["logprobs"])[~sampled] == 0).all()


def test_the_trainer_has_the_log_probs_that_were_recorded_for_three_turns(
    run: Path, rollouts: dict[str, Rows]
) -> None:
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.step import Trainer

    every = [row for of_task in rollouts.values() for row in of_task]
    trained = [row for row in every if row["step"] == 0 and row["trained"]]
    assert any(len(turn_ranges(segments(row["origins"]))) >= 3 for row in trained)
    config = load_config(run / CONFIG_FILE)
    with world_of_one(config):
        trainer = Trainer(config, Policy(config, run / "start" / "tiny_dense"))
        metrics = trainer.train_step(recorded_batch(run / "rollouts", 0), 0).metrics
    # All of them are of version 0.
    sampled = sum(row["origins"].count(SAMPLED) for row in trained)
    assert metrics["same_version_logprob_tokens"] == metrics["tokens_trained"] == sampled
    assert metrics["same_version_logprob_error_max"] < 1e-4


def segments(origins: list[int]) -> list[Segment]:
    """Return the runs of equal origins."""
    ends = np.flatnonzero(np.diff(origins, append=-1)) + 1
    starts = [0, *ends[:-1].tolist()]
    return [Segment(ORIGINS[origins[i]], i, int(j)) for i, j in zip(starts, ends, strict=True)]
