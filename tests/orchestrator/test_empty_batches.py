"""Batches from which nothing can be learned are skipped, counted and said."""

import pytest

from megatron_rl.rewards import Outcome, Verdict
from tests.orchestrator.peers import AtOnce, run, small_config
from tests.orchestrator.test_schedules import changed, phases


def every_second_batch(prompt, sample):
    """Return different verdicts for the completions of the second, fourth, ... three prompts."""
    right = sample.group // 3 % 2 and sample.index % 2
    return Verdict(Outcome.CORRECT if right else Outcome.WRONG, "")


def test_phases_have_their_number_of_steps_without_the_batches_that_are_skipped():
    outcome = run(phases(2, steps=4), verification=AtOnce(every_second_batch))
    assert [row["step"] for row in outcome.rows.steps] == list(range(4))
    assert len(outcome.rows.events) >= 4
    assert max(row["lag_max"] for row in outcome.rows.steps) <= 1


def test_a_batch_without_anything_to_learn_is_no_step():
    outcome = run(small_config(steps=5), verification=AtOnce(every_second_batch))
    rows, skipped, whole = outcome.rows.steps, outcome.rows.events, run(small_config())
    assert [row["step"] for row in rows] == list(range(5))
    assert [(row["event"], row["step"]) for row in skipped] == [
        ("empty_batch", i) for i in range(5)
    ]
    assert [row["empty_batches"] for row in rows] == [1] * 5
    assert max(row["lag_max"] for row in rows) <= 2
    # Each prompt is drawn once, trained or skipped; all tokens are counted.
    prompts = [
        p for pair in zip(skipped, rows, strict=True) for row in pair for p in row["prompt_ids"]
    ]
    assert prompts == [p for row in whole.rows.steps[:10] for p in row["prompt_ids"]]
    spent = sum(row["tokens"] for row in (*rows, *skipped))
    assert rows[-1]["compute_train_tokens"] == spent
    assert [g.versions[-1] for g in outcome.generators] == [5, 5]


@pytest.mark.parametrize("term", ["kl_coefficient", "entropy_coefficient"])
def test_a_batch_of_equal_rewards_is_trained_where_the_objective_has_other_terms(term):
    config = changed(
        small_config(steps=4, max_empty_batches=1),
        algorithm={term: 0.1, "zero_variance_filter": False},
    )
    outcome = run(config, verification=AtOnce(lambda *_: Verdict(Outcome.WRONG, "")))
    assert [row["step"] for row in outcome.rows.steps] == [0, 1, 2, 3]
