import pytest
from pydantic import ValidationError

from megatron_rl.algorithm.schedule import Schedule


def test_pipeline_takes_versions_up_to_k_steps_old():
    s = Schedule(max_lag_steps=3)
    assert [s.oldest_version(step) for step in (0, 3, 7)] == [-3, 0, 4]
    assert [s.phase_steps(step) for step in (0, 3, 7)] == [1, 1, 1]


def test_ppo_off_policy_generates_a_phase_by_the_weights_at_its_start():
    s = Schedule(mode="ppo_off_policy", updates_per_phase=4, steps=10)
    assert s.max_lag_steps == 3
    assert [s.oldest_version(step) for step in range(10)] == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    # The whole phase must be there before its first step; the last phase is cut by the end.
    assert [s.phase_steps(step) for step in range(10)] == [4, 1, 1, 1, 4, 1, 1, 1, 2, 1]


def test_synchronous_takes_the_current_weights_only():
    s = Schedule(mode="synchronous")
    assert s.max_lag_steps == 0
    assert [s.oldest_version(step) for step in (0, 5)] == [0, 5]


def test_ppo_off_policy_has_8_updates_by_default():
    assert Schedule(mode="ppo_off_policy").updates_per_phase == 8


def test_what_follows_from_the_mode_survives_a_round_trip():
    for mode in ("pipeline", "ppo_off_policy", "synchronous"):
        s = Schedule(mode=mode)
        assert Schedule.model_validate(s.model_dump()) == s


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"mode": "synchronous", "max_lag_steps": 8},
            "schedule.max_lag_steps is 8: schedule.mode = 'synchronous'",
        ),
        (
            {"mode": "ppo_off_policy", "updates_per_phase": 4, "max_lag_steps": 4},
            "schedule.max_lag_steps is 4: .*schedule.updates_per_phase = 4 has a lag of at most 3",
        ),
        (
            {"updates_per_phase": 4},
            "schedule.updates_per_phase is 4: schedule.mode = 'pipeline' has no phases",
        ),
    ],
)
def test_a_lag_that_contradicts_the_mode_is_refused_with_both_keys(values, message):
    with pytest.raises(ValidationError, match=message):
        Schedule(**values)
