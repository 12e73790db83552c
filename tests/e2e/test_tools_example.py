"""Ten steps of `examples/scalerl_tools_tiny.sh`: calls, turns of several versions, log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.config import CONFIG_FILE, load_config
from megatron_rl.data.lookup import lookup
from megatron_rl.messages import ORIGINS, Segment, turn_ranges
from megatron_rl.metrics.rollouts import read_rollouts
from megatron_rl.orchestrator.replay import recorded_batch
from tests.e2e.processes import finish, rows, start
from tests.trainer.cases import world_of_one

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SETTINGS = [
    "--schedule.steps",
    "10",
    "--schedule.max_lag_steps",
    "3",
    "--task.heldout_prompts",
    "8",
    "--sft.steps",
    "200",
    "--evaluation.every_steps",
    "10",
    "--evaluation.samples_per_prompt",
    "2",
    "--metrics.rollouts_ratios",
    "true",
    "--metrics.logprob_check_every_steps",
    "1",
    "--metrics.terminal",
    "plain",
]
SAMPLED, GIVEN, PROMPT = 0, 2, 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    log = folder / "log.txt"
    command = ["bash", "examples/scalerl_tools_tiny.sh", *SETTINGS]
    finish(start([*command, "--output_dir", str(folder / "run")], log), log, seconds=400)
    return folder / "run"


@pytest.fixture(scope="module")
def rollouts(run: Path) -> list[dict[str, Any]]:
    table = read_rollouts(run / "rollouts").to_pylist()
    return [row for row in table if row["kind"] == "train"]


def test_tools_are_called_and_their_results_are_given(rollouts: list[dict[str, Any]]) -> None:
    called = [row for row in rollouts if GIVEN in row["origins"]]
    assert len(called) > len(rollouts) / 10
    for row in called:
        text = row["completion"]
        first = row["prompt"].split(";")[1][:4]
        assert row["origins"][0] == PROMPT and text.startswith("<bos>")
        if f'"key": "{first}"' in text:
            assert f"<tool_response>{lookup(first)}</tool_response>" in text
    right = [row for row in rollouts if row["verdict"] == "correct"]
    assert right and all(row["origins"].count(GIVEN) >= 2 * 6 for row in right)


def test_both_sides_agree_on_every_sampled_token_and_no_other_has_a_ratio(
    run: Path, rollouts: list[dict[str, Any]]
) -> None:
    errors = [row["logprob_error_max"] for row in rows(run, "step") if "logprob_error_max" in row]
    assert len(errors) > 5 and max(errors) < 1e-4
    for row in (row for row in rollouts if row["trained"]):
        sampled = np.array(row["origins"]) == SAMPLED
        assert (np.isfinite(row["ratios"]) == sampled).all()
        assert (np.array(row["logprobs"])[~sampled] == 0).all()


def test_the_trainer_has_the_log_probs_that_were_recorded_for_three_turns(
    run: Path, rollouts: list[dict[str, Any]]
) -> None:
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.step import Trainer

    trained = [row for row in rollouts if row["step"] == 0 and row["trained"]]
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


def test_turns_are_of_several_weight_versions_within_the_lag(
    run: Path, rollouts: list[dict[str, Any]]
) -> None:
    versions = [
        {v for v, o in zip(row["versions"], row["origins"], strict=True) if o == SAMPLED}
        for row in rollouts
    ]
    assert any(len(one) > 1 for one in versions)
    assert max(row["lag_max"] for row in rows(run, "step")) <= 3
