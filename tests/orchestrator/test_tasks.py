"""Several tasks in one run: shares, metrics and curves of each."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.data.question import DataError
from megatron_rl.metrics import METRICS
from megatron_rl.orchestrator.batching import by_task, task_metrics
from megatron_rl.orchestrator.groups import Group
from megatron_rl.orchestrator.state import load_state
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.rewards.verifier_settings import RewardValues
from tests.orchestrator.peers import TWO_TASKS, run, small_config
from tests.orchestrator.test_batching import build, floats, ints, sample


def two_tasks(**schedule):
    return small_config(TWO_TASKS, **schedule)


def verified_group(index, letters, *, task="a", values=None):
    """Return a group whose verdicts are given by their first letters."""
    g = Group(index, index, len(letters), task, values or RewardValues())
    for i, letter in enumerate(letters):
        g.samples[i] = sample(i, 2, group=index)
        g.verdicts[i] = Verdict(next(o for o in Outcome if o.value[0] == letter), "")
    return g


# ---------------------------------------------------------------- the run


def test_each_task_has_its_share_of_every_few_prompts():
    rows = run(two_tasks()).rows.steps
    # Weights 2 and 1, three prompts a step; ids below 40 are the first task's.
    drawn = [p < 40 for row in rows for p in row["prompt_ids"]]
    for n in range(1, len(drawn) + 1):
        assert abs(sum(drawn[:n]) - n * 2 / 3) <= 2
    for row in rows:
        parts = row["tasks"]
        counted = {
            t: p["prompts_trained"] + p["prompts_dropped_zero_variance"] for t, p in parts.items()
        }
        first = sum(p < 40 for p in row["prompt_ids"])
        assert counted == {"arithmetic": first, "sums": 3 - first}


def test_the_parts_of_a_row_add_up_to_the_whole():
    for row in run(two_tasks()).rows.steps:
        parts = row["tasks"].values()
        for name in ("completions", "prompts_trained", "completions_truncated"):
            assert sum(part[name] for part in parts) == row[name]
        assert sum((Counter(p["verdicts"]) for p in parts), Counter()) == Counter(row["verdicts"])
        assert {name for part in parts for name in part} <= set(METRICS)


def test_each_task_has_a_curve_of_its_own():
    evals = run(two_tasks()).rows.evals
    assert [row["step"] for row in evals] == [0, 3, 6, 12]
    for row in evals:
        parts = row["tasks"]
        assert {t: p["num_prompts"] for t, p in parts.items()} == {"arithmetic": 4, "sums": 4}
        mean = sum(p["pass_rate"] for p in parts.values()) / 2
        assert row["pass_rate"] == pytest.approx(mean)
        assert {name for part in parts.values() for name in part} <= set(METRICS)


def test_a_run_of_one_task_has_no_parts():
    rows = run(small_config()).rows
    assert all("tasks" not in row for row in (*rows.steps, *rows.evals))


def test_a_resumed_mixture_draws_the_same_prompts(tmp_path):
    whole = run(two_tasks(), seed=1)
    first = run(two_tasks(), seed=2, directory=tmp_path, save_before=5, stop_before=5)
    rest = run(two_tasks(), seed=3, directory=tmp_path, resume=True)
    prompts = [r["prompt_ids"] for r in (*first.rows.steps, *rest.rows.steps)]
    assert prompts == [r["prompt_ids"] for r in whole.rows.steps]
    with pytest.raises(DataError, match="made with the mixture"):
        other = {
            **TWO_TASKS,
            "tasks": {"arithmetic": {"weight": 5.0}, "sums": {"kind": "arithmetic"}},
        }
        run(small_config(other), directory=tmp_path, resume=True)


def test_a_state_of_another_format_is_refused(tmp_path):
    run(two_tasks(), directory=tmp_path, save_before=2, stop_before=2)
    path = tmp_path / "orchestrator.msgpack"
    path.write_bytes(path.read_bytes().replace(b"orchestrator/7", b"orchestrator/4"))
    with pytest.raises(ConfigError, match="this version reads"):
        load_state(tmp_path, "fingerprint", 3)


def test_an_evaluation_that_an_interrupt_cut_off_is_made_up_where_the_run_goes_on(tmp_path):
    # The evaluation at step 3 is slow, and the run is interrupted at step 5 before it is over.
    first = run(small_config(), directory=tmp_path, save_before=5, stop_before=5, slowness=0.05)
    made = [row["step"] for row in first.rows.evals]
    assert made in ([0], [0, 3])
    rest = run(small_config(), directory=tmp_path, resume=True, evaluated=set(made))
    assert [row["step"] for row in rest.rows.evals] == [*([5] if made == [0] else []), 6, 12]


# ---------------------------------------------------------------- counts by hand


def test_a_verdict_that_is_no_reward_is_no_part_of_the_baseline():
    # Right, wrong, and two without a reward: the mean of the rewards is 0, not -1/2.
    values = RewardValues(no_answer=None)
    built = build(
        [verified_group(0, "cwtn", task="", values=values)], advantage_normalization="none"
    )
    assert len(ints(built.batch.prompt_lengths)) == 2
    assert sorted(set(floats(built.batch.advantages).tolist())) == [-1, 0, 1]
    assert built.metrics["reward_mean"] == 0
    assert built.metrics["completions_without_reward"] == 2


def test_a_missing_answer_is_a_reward_unless_the_configuration_says_otherwise():
    built = build([verified_group(0, "cn", task="")], advantage_normalization="none")
    assert sorted(set(floats(built.batch.advantages).tolist())) == [-1, 0, 1]
    none = verified_group(0, "cn", task="", values=RewardValues(no_answer=None))
    assert build([none]).batch.token_ids == b""  # a single reward


@pytest.mark.parametrize(
    ("letters", "rate"), [("ccww", 0.5), ("cnnn", 0.25), ("cut", 0.5), ("tt", None), ("ctt", 1.0)]
)
def test_only_a_comparison_that_did_not_end_is_not_counted_in_the_pass_rate(letters, rate):
    assert verified_group(0, letters).pass_rate == rate


def test_tasks_are_counted_apart():
    groups = [verified_group(0, "cw"), verified_group(1, "cc"), verified_group(2, "wt", task="b")]
    parts = by_task(("a", "b", "c"), groups, groups[:1])
    assert parts["a"]["train_pass_rate"] == 0.75
    assert parts["a"]["prompts_trained"] == 1
    assert parts["a"]["prompts_dropped_zero_variance"] == 1
    assert parts["b"]["train_pass_rate"] == 0.0
    assert parts["b"]["verdicts"] == {"timed_out": 1, "wrong": 1}
    assert parts["b"]["completions_without_reward"] == 1
    assert parts["c"]["completions"] == 0 and "train_pass_rate" not in parts["c"]


def test_means_without_a_value_are_left_out():
    metrics = task_metrics([verified_group(0, "tt")], [])
    assert "reward_mean" not in metrics and "train_pass_rate" not in metrics
