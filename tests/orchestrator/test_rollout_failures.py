"""Rollouts whose tools fail are made again, then dropped and counted; none becomes a reward."""

from __future__ import annotations

import numpy as np

from megatron_rl import messages as m
from megatron_rl.orchestrator.evaluation import sampling_stderr
from megatron_rl.orchestrator.groups import Group, GroupQueue
from tests.orchestrator import peers
from tests.orchestrator.peers import run, small_config

ATTEMPTS = 3


def failing(monkeypatch, when) -> list[m.Sample]:
    """Have generators fail where `when(sample, times before)` is true; return what they failed."""
    failed: list[m.Sample] = []

    class Failing(peers.Generator):
        async def send(self, message):
            if isinstance(message, m.Sample):
                key = message.evaluation, message.group, message.index
                before = sum((f.evaluation, f.group, f.index) == key for f in failed)
                if when(message, before):
                    failed.append(message)
                    message = m.RolloutFailed(
                        group=message.group, index=message.index, prompt_id=message.prompt_id,
                        evaluation=message.evaluation, cause="timed out", reason="the tool hangs",
                    )  # fmt: skip
            await super().send(message)

    monkeypatch.setattr(peers, "Generator", Failing)
    return failed


def test_rollouts_that_fail_once_are_made_again_and_the_same_prompts_are_trained(monkeypatch):
    undisturbed = run(small_config())
    failed = failing(monkeypatch, lambda s, before: s.index % 2 == 0 and before == 0)
    outcome = run(small_config())
    prompts = [[row["prompt_ids"] for row in one.rows.steps] for one in (outcome, undisturbed)]
    assert prompts[0] == prompts[1]
    assert all(row["completions"] == 12 for row in outcome.rows.steps)
    counts = [row.get("rollouts_failed", {}).get("timed out", 0) for row in outcome.rows.steps]
    assert 0 < sum(counts) <= len(failed)
    assert sum(row.get("rollouts_dropped", 0) for row in outcome.rows.steps) == 0
    assert [row["samples_per_prompt"] for row in outcome.rows.evals] == [2] * len(
        outcome.rows.evals
    )


def test_a_rollout_that_always_fails_is_dropped_without_a_reward(monkeypatch):
    failed = failing(monkeypatch, lambda s, before: s.index == 1 and s.group % 3 == 0)
    outcome = run(small_config())
    assert len(outcome.rows.steps) == 12
    # Group 0, 3, 6, ... is without its second completion: three groups of four a step.
    assert {row["completions"] for row in outcome.rows.steps} == {11}
    assert sum(row.get("rollouts_dropped", 0) for row in outcome.rows.steps) >= 11
    trained = [f for f in failed if f.evaluation < 0]
    assert len(trained) >= 12 * ATTEMPTS
    evals = outcome.rows.evals
    assert len(evals) == 4 and all(row["completions_dropped"] for row in evals)
    assert all(0.0 <= row["pass_rate"] <= 1.0 for row in evals)


def test_a_group_whose_rollouts_are_all_dropped_has_failed_and_is_replaced():
    queue = GroupQueue(1, lambda group: False)
    for _ in range(2):
        queue.dispatch(lambda: 0, lambda index, prompt: Group(index, prompt, 2))
    group = queue[0]
    assert not queue.rollout_failed(group, 0, 2)
    assert queue.next_to_dispatch == 0
    assert queue.dispatch(lambda: 0, Group)[1] == [0]
    assert queue.rollout_failed(group, 0, 2) and not group.failed
    assert queue.rollout_failed(group, 1, 1) and group.failed
    assert queue.get(0) is None and queue.latest_step(1) == 0


def test_a_missing_sample_widens_the_error_of_its_prompt_alone():
    full = np.array([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]])
    expected = np.sqrt((full.var(axis=1, ddof=1) / 4).sum()) / 2
    assert sampling_stderr(full) == expected
    part = full.copy()
    part[0, 3] = np.nan
    variances = full[0, :3].var(ddof=1) / 3, full[1].var(ddof=1) / 4
    np.testing.assert_allclose(sampling_stderr(part), np.sqrt(sum(variances)) / 2)
