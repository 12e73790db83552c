import msgspec
import numpy as np
import pytest

from megatron_rl.config import Evaluation
from megatron_rl.messages import Sample, VersionSpan
from megatron_rl.orchestrator.child_process import EvaluateOnly
from megatron_rl.orchestrator.evaluation import (
    EvaluatedSample,
    EvaluationRun,
    evaluation_steps,
    sampling_stderr,
    steps_left,
)
from megatron_rl.rewards import Outcome, Verdict
from tests.orchestrator.peers import TWO_TASKS, prompt_set, run, small_config


def test_steps_are_even_in_the_logarithm_and_include_both_ends():
    steps = evaluation_steps(Evaluation(points=5, first_step=8), 128)
    assert steps == [0, 8, 16, 32, 64, 128]


def test_close_points_are_evaluated_once():
    steps = evaluation_steps(Evaluation(points=12, first_step=1), 6)
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 6


def completion(prompt, index, version=7):
    return Sample(
        group=prompt, index=index, prompt_id=prompt, evaluation=7, token_ids=[5, 6],
        logprobs=[-1.0, -1.0], forced=(0, 0), spans=[VersionSpan(version, 0, 2)],
        finish_reason="stop",
    )  # fmt: skip


def test_mean_at_n_and_its_row():
    evaluation = EvaluationRun(7, ["a", "a"], 4, {"compute_tokens": 5.0})
    for prompt, passed in ((0, "ccwn"), (1, "cwtu")):
        for i, letter in enumerate(passed):
            assert not evaluation.complete
            outcome = next(o for o in Outcome if o.value[0] == letter)
            evaluation.add(completion(prompt, i), Verdict(outcome, ""))
    assert evaluation.complete
    row = evaluation.row(1.5)
    assert row["pass_rate"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert row["pass_at_n"] == 1.0
    assert row["compute_tokens"] == 5.0
    # variances 1/3 and 1/4 over n = 4, two prompts: sqrt(1/12 + 1/16) / 2
    assert row["pass_rate_stderr"] == pytest.approx(np.sqrt(1 / 12 + 1 / 16) / 2)
    # only a correct answer passes; what was not is counted by kind
    assert row["verdicts"] == {
        "correct": 3, "no_answer": 1, "timed_out": 1, "unparsable": 1, "wrong": 2
    }  # fmt: skip
    assert row["eval_completion_tokens_mean"] == 2 and row["eval_truncated_fraction"] == 0
    assert "tasks" not in row


def test_each_task_of_several_has_its_own_part_of_the_row():
    evaluation = EvaluationRun(7, ["a", "b", "a"], 2, {})
    right = {0: [1, 0], 1: [1, 1], 2: [0, 0]}
    for prompt, passed in right.items():
        for i, ok in enumerate(passed):
            outcome = Outcome.CORRECT if ok else Outcome.WRONG
            evaluation.add(completion(prompt, i), Verdict(outcome, ""))
    row = evaluation.row(0.0)
    assert row["pass_rate"] == pytest.approx(1 / 2)
    tasks = row["tasks"]
    assert {name: part["pass_rate"] for name, part in tasks.items()} == {"a": 0.25, "b": 1.0}
    assert {name: part["num_prompts"] for name, part in tasks.items()} == {"a": 2, "b": 1}
    # two samples of variance 1/2 on one of the two prompts of a
    assert tasks["a"]["pass_rate_stderr"] == pytest.approx(np.sqrt(1 / 2 / 2) / 2)


@pytest.mark.parametrize(
    ("evaluated", "first", "left"),
    [
        (set(), 0, {0, 8, 20}),
        ({0, 8}, 10, {20}),
        ({0}, 10, {10, 20}),  # the one at 8 was under way when the run ended
        ({0, 8, 20}, 20, set()),
        ({0, 8}, 20, {20}),
    ],
)
def test_an_evaluation_that_a_run_did_not_finish_is_made_where_it_goes_on(evaluated, first, left):
    assert steps_left([0, 8, 20], evaluated, first) == left


def test_a_completion_of_another_version_is_refused():
    evaluation = EvaluationRun(7, ["a"], 1, {})
    with pytest.raises(ValueError, match=r"step 7.*versions \[8\]"):
        evaluation.check_versions(completion(0, 0, version=8))


def test_the_standard_error_matches_repeated_draws():
    rng = np.random.default_rng(0)
    p = rng.uniform(0, 1, size=(40, 1))
    draws = [(rng.uniform(size=(40, 16)) < p).astype(float) for _ in range(400)]
    spread = np.std([d.mean() for d in draws])
    assert np.mean([sampling_stderr(d) for d in draws]) == pytest.approx(spread, rel=0.1)


def test_a_perfect_score_has_no_error_of_zero():
    assert sampling_stderr(np.ones((10, 16))) > 0


# ---------------------------------------------------------------- whole runs


def test_a_generator_that_comes_late_has_its_own_share_of_an_evaluation():
    outcome = run(small_config(), late=0.1, slowness=0.05)
    assert [row["step"] for row in outcome.rows.evals] == [0, 3, 6, 12]
    assert all(row["num_prompts"] == 6 for row in outcome.rows.evals)


def test_without_training_version_0_is_evaluated_and_every_completion_is_recorded(tmp_path):
    config, path = small_config(TWO_TASKS), tmp_path / "samples.jsonl"
    heldout = prompt_set(config).heldout
    only = EvaluateOnly(heldout=heldout, temperature=0.0, samples_file=str(path))
    outcome = run(config, evaluate_only=only, late=0.05)
    assert outcome.rows.steps == [] and outcome.orchestrator.trainer_done.step == 0
    (row,) = outcome.rows.evals
    assert row["step"] == 0 and row["num_prompts"] == 8 and set(row["tasks"]) == set(config.tasks)
    assert {g.temperature for g in outcome.generators} == {0.0}
    lines = path.read_bytes().splitlines()
    samples = [msgspec.json.decode(line, type=EvaluatedSample) for line in lines]
    expected = [(prompt, i) for prompt in range(8) for i in (0, 1)]
    assert sorted((s.prompt_id, s.index) for s, _ in samples) == expected
    assert sum(v.passed for _, v in samples) / 16 == row["pass_rate"]
    assert all(v.passed == (s.token_ids[0] % 2 == 0) for s, v in samples)
