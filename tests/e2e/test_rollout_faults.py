"""A run whose environment raises, hangs, floods and dies goes on; no failure is a reward."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psutil
import pytest

from megatron_rl.data.lookup import lookup
from megatron_rl.metrics.rollouts import read_rollouts
from tests.e2e.faulty_environment import fails_always
from tests.e2e.processes import ROOT, finish, rows, start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 8
SETTINGS = f"""
  --task.rollout environment --task.environment tests.e2e.faulty_environment:FaultyLookups
  --schedule.steps {STEPS} --schedule.prompts_per_step 6 --schedule.completions_per_prompt 4
  --task.heldout_prompts 4 --sft.steps 200 --rollout.environment_seconds 3 --rollout.workers 2
  --generation.concurrent_completions 24
  --evaluation.every_steps {STEPS} --evaluation.samples_per_prompt 1 --metrics.terminal plain
""".split()


def test_a_run_goes_on_when_its_environment_fails_in_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    log, run = tmp_path / "log.txt", tmp_path / "run"
    command = ["bash", "examples/scalerl_tools_tiny.sh", *SETTINGS]
    finish(start([*command, "--output_dir", str(run)], log), log, seconds=400)

    steps = rows(run, "step")
    assert [row["step"] for row in steps] == list(range(STEPS))
    failed = sum((Counter(row.get("rollouts_failed", {})) for row in steps), Counter())
    assert set(failed) == {"raised", "timed out", "flooded", "died"}
    assert sum(row.get("rollouts_dropped", 0) for row in steps) > 0

    table = [row for row in read_rollouts(run / "rollouts").to_pylist() if row["kind"] == "train"]
    assert sum(row["trained"] for row in table) > 0
    for row in table:
        hops, key = row["prompt"].removeprefix("<bos>").rstrip("?").split(";")
        assert not fails_always(key)
        for _ in range(int(hops)):
            key = lookup(key)
        right = row["completion"].endswith(f"\\boxed{{{key}}}<eos>")
        assert (row["verdict"] == "correct") == right
        assert row["reward"] == (1.0 if right else -1.0)

    workers = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if "megatron_rl.rollouts.environments.episodes" in (process.info["cmdline"] or [])
    ]
    assert all(psutil.pid_exists(int(command[-1])) for command in workers)
