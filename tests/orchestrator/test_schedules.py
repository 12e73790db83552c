"""Off-policy schedules and refill: lag, order, prompts and resumption, with made-up completions."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest

from megatron_rl.config import RunConfig
from megatron_rl.orchestrator import RunError, steps
from megatron_rl.orchestrator.state import load_state
from megatron_rl.rewards import Outcome, Verdict
from tests.orchestrator.peers import AtOnce, run, small_config


def changed(config: RunConfig, **sections) -> RunConfig:
    """Return the configuration with other values in some sections."""
    values = config.model_dump()
    for section, some in sections.items():
        values[section] |= some
    return RunConfig.model_validate(values)


def phases(k: int, **schedule) -> RunConfig:
    values = small_config().model_dump()
    values["schedule"] |= {"mode": "ppo_off_policy", "updates_per_phase": k, "max_lag_steps": k - 1}
    values["schedule"] |= schedule
    return RunConfig.model_validate(values)


def refilling(**schedule) -> RunConfig:
    # Of two completions half the groups have one reward: some are dropped in every run.
    return changed(small_config(completions_per_prompt=2, **schedule), algorithm={"refill": True})


# ---------------------------------------------------------------- checkpoints


def test_saves_come_by_time_and_by_steps(monkeypatch):
    looks = itertools.count(0, 40)  # the clock at the start, and at each batch
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    saves, build = [], steps.StepBuilder.build

    def recorded(self, step, groups):
        built = build(self, step, groups)
        saves.extend([step] if built is not None and built.batch.save else [])
        return built

    monkeypatch.setattr(steps.StepBuilder, "build", recorded)
    rule = {"every_minutes": 2, "every_steps": 100, "keep_every": 100}
    run(changed(small_config(steps=12), checkpoint=rule))
    assert saves == [2, 5, 8, 11]
    saves.clear()
    looks = itertools.repeat(0)
    run(changed(small_config(steps=12), checkpoint=rule | {"every_steps": 4, "keep_every": 6}))
    assert saves == [4, 6, 8]


# ---------------------------------------------------------------- PPO-off-policy-k


@pytest.mark.parametrize("k", [1, 4, 5])
def test_a_phase_is_generated_by_the_weights_at_its_start(k):
    outcome = run(phases(k))
    assert [row["step"] for row in outcome.rows.steps] == list(range(12))
    for row in outcome.rows.steps:
        assert set(row["lag_histogram"]) == {str(row["step"] % k)}
        assert row["multi_version_fraction"] == 0


def test_the_synchronous_mode_is_on_policy():
    values = small_config().model_dump()
    values["schedule"] |= {"mode": "synchronous", "max_lag_steps": 0}
    outcome = run(RunConfig.model_validate(values))
    assert {lag for row in outcome.rows.steps for lag in row["lag_histogram"]} == {"0"}


def test_a_run_that_is_resumed_within_a_phase_trains_the_rest_of_it(tmp_path):
    config = phases(4)
    whole = run(config, seed=1)
    first = run(config, seed=2, directory=tmp_path, save_before=6, stop_before=6)
    rest = run(config, seed=3, directory=tmp_path, resume=True)
    # The rest of the phase was complete when it began: it is kept, not generated again.
    assert [set(r["lag_histogram"]) for r in rest.rows.steps[:2]] == [{"2"}, {"3"}]
    prompts = [r["prompt_ids"] for r in (*first.rows.steps, *rest.rows.steps)]
    assert prompts == [r["prompt_ids"] for r in whole.rows.steps]


# ---------------------------------------------------------------- refill


def test_a_refilled_step_trains_its_full_number_of_prompts():
    outcome = run(refilling())
    rows = outcome.rows.steps
    assert [row["step"] for row in rows] == list(range(12))
    assert all(row["prompts_trained"] == 3 for row in rows)
    assert all(len(r["prompt_ids"]) == 3 + r["prompts_refilled"] for r in rows)
    assert all(row["prompts_dropped_zero_variance"] == row["prompts_refilled"] for row in rows)
    assert sum(row["prompts_refilled"] for row in rows) > 0


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_the_lag_bound_holds_with_refill(lag):
    outcome = run(refilling(max_lag_steps=lag), slowness=0.004)
    assert max(row["lag_max"] for row in outcome.rows.steps) <= lag


def test_refill_within_phases_keeps_one_behaviour_policy():
    outcome = run(changed(phases(4), algorithm={"refill": True}))
    for row in outcome.rows.steps:
        assert row["prompts_trained"] == 3
        assert set(row["lag_histogram"]) == {str(row["step"] % 4)}


def test_dropped_prompts_are_consumed_and_none_is_drawn_twice_in_an_epoch():
    outcome = run(refilling())
    drawn = [p for row in outcome.rows.steps for p in row["prompt_ids"]]
    # 40 prompts: the second epoch begins after the first was drawn as a whole
    assert sorted(drawn[:40]) == list(range(40)) or max(Counter(drawn[:40]).values()) == 1


def test_a_refilling_run_that_is_resumed_trains_every_step_once(tmp_path):
    config = refilling(max_lag_steps=4)
    first = run(config, seed=2, directory=tmp_path, save_before=5, stop_before=5)
    state = load_state(tmp_path, "fingerprint", 3)
    taken = sum(len(row["prompt_ids"]) for row in first.rows.steps)
    assert state.consumed == taken > 15
    assert min(g.index for g in state.groups) == taken
    rest = run(config, seed=3, directory=tmp_path, resume=True)
    assert [row["step"] for row in rest.rows.steps] == list(range(5, 12))
    assert all(row["prompts_trained"] == 3 for row in rest.rows.steps)
    assert max(row["lag_max"] for row in rest.rows.steps) <= 4
    drawn = [p for r in (*first.rows.steps, *rest.rows.steps) for p in r["prompt_ids"]]
    assert max(Counter(drawn[:40]).values()) == 1


def test_prompts_that_teach_nothing_end_the_run_with_what_to_do():
    config = changed(small_config(), algorithm={"refill": True, "refill_max_ratio": 2.0})

    def always_right(prompt, sample):
        return Verdict(Outcome.CORRECT, "")

    with pytest.raises(
        RunError, match=r"step 0: \d+ prompts were drawn.*algorithm.refill_max_ratio"
    ):
        run(config, verification=AtOnce(always_right))


# ---------------------------------------------------------------- temperature


def test_no_scores_are_asked_for_at_another_temperature():
    # Engines score from the plain logits and refuse: the run must not ask.
    config = changed(small_config(), generation={"temperature": 0.7})
    outcome = run(config)
    assert all("logprob_error_max" not in row for row in outcome.rows.steps)
    assert any("logprob_error_max" in row for row in run(small_config()).rows.steps)
