"""Twenty steps through the endpoint: an agent with an OpenAI client in place of the tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.metrics.rollouts import read_rollouts
from tests.e2e.processes import ROOT, finish, rows, start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 20
SETTINGS = f"""
  --task.rollout agent --task.agent tests.rollouts.agents:look_up
  --schedule.steps {STEPS} --schedule.prompts_per_step 6 --schedule.completions_per_prompt 4
  --task.heldout_prompts 4 --sft.steps 200 --rollout.seconds 60
  --generation.concurrent_completions 24
  --evaluation.every_steps {STEPS} --evaluation.samples_per_prompt 1
  --metrics.logprob_check_every_steps 1 --metrics.terminal plain
""".split()


def test_an_agent_is_trained_through_the_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    log, run = tmp_path / "log.txt", tmp_path / "run"
    command = ["bash", "examples/scalerl_tools_tiny.sh", *SETTINGS]
    finish(start([*command, "--output_dir", str(run)], log), log, seconds=400)
    steps = rows(run, "step")
    assert [row["step"] for row in steps] == list(range(STEPS))
    errors = [row["logprob_error_max"] for row in steps if "logprob_error_max" in row]
    assert errors and max(errors) < 1e-4
    table = read_rollouts(run / "rollouts").to_pylist()
    several = [row for row in table if row["kind"] == "train" and 2 in row["origins"]]
    assert several and all(row["origins"][0] == 3 for row in several)
    assert any(row["verdict"] == "correct" for row in several)
