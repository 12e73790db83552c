from contextlib import closing

import msgspec
import numpy as np
import pytest

from megatron_rl.config import ConfigError, Evaluation, RunConfig
from megatron_rl.messages import Sample, VersionSpan, float_bytes, int_bytes, ints
from megatron_rl.metrics import METRICS, MetricsWriter, read_metrics
from megatron_rl.orchestrator.child_process import EvaluateOnly
from megatron_rl.orchestrator.evaluation import (
    EvaluatedSample,
    EvaluationRun,
    evaluation_steps,
    evaluations_in,
    sampling_stderr,
    steps_left,
)
from megatron_rl.orchestrator.state import load_state
from megatron_rl.rewards import Outcome, Verdict
from tests.orchestrator.peers import TWO_TASKS, prompt_set, run, small_config
from tests.segments import segments


def test_steps_are_even_in_the_logarithm_and_include_both_ends():
    steps = evaluation_steps(Evaluation(points=5, first_step=8), 128)
    assert steps == [0, 8, 16, 32, 64, 128]


def test_close_points_are_evaluated_once():
    steps = evaluation_steps(Evaluation(points=12, first_step=1), 6)
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 6


def completion(prompt, index, version=7, logprobs=(-1.0, -1.0), forced=(0, 0)):
    n = len(logprobs)
    return Sample(
        group=prompt, index=index, prompt_id=prompt, evaluation=7, token_ids=int_bytes([5] * n),
        logprobs=float_bytes(logprobs), segments=segments(n, forced),
        spans=[VersionSpan(version, 0, n)], finish_reason="stop",
    )  # fmt: skip


def test_mean_at_n_and_its_row():
    evaluation = EvaluationRun(7, {0: "a", 1: "a"}, 4, {"compute_tokens": 5.0})
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
    assert row["eval_entropy"] == 1.0
    assert "tasks" not in row


def test_entropy_is_the_mean_of_minus_log_p_over_the_sampled_tokens_of_all_completions():
    evaluation, right = EvaluationRun(7, {0: "a", 1: "b"}, 1, {}), Verdict(Outcome.CORRECT, "")
    # Four tokens, of which two are forced (log-prob 0 in the message); one token.
    first = completion(0, 0, logprobs=(-0.5, 0.0, 0.0, -1.5), forced=(1, 3))
    evaluation.add(first, right)
    evaluation.add(completion(1, 0, logprobs=(-4.0,)), right)
    row = evaluation.row(0.0)
    assert row["eval_entropy"] == pytest.approx((0.5 + 1.5 + 4.0) / 3)
    assert {t: part["eval_entropy"] for t, part in row["tasks"].items()} == {"a": 1.0, "b": 4.0}
    # Samples of a known distribution: their mean comes to its entropy.
    p, rng = np.array([0.7, 0.2, 0.1]), np.random.default_rng(0)
    sampled = EvaluationRun(7, {0: ""}, 100, {})
    for i in range(100):
        drawn = rng.choice(3, size=200, p=p)
        sampled.add(completion(0, i, logprobs=np.log(p[drawn])), right)
    assert sampled.row(0.0)["eval_entropy"] == pytest.approx(-(p @ np.log(p)), rel=0.02)


def test_each_task_of_several_has_its_own_part_of_the_row():
    evaluation = EvaluationRun(7, {0: "a", 1: "b", 2: "a"}, 2, {})
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
        ({0, 10}, 15, {20}),  # a later start that lost it has its point at 10
        ({0, 8, 20}, 20, set()),
        ({0, 8}, 20, {20}),
        ({0, 5, 11}, 11, {20}),  # a run of 11 steps that is extended: 11 has its point
    ],
)
def test_an_evaluation_that_a_run_did_not_finish_is_made_where_it_goes_on(evaluated, first, left):
    assert steps_left([0, 8, 20], evaluated, first) == left


def test_a_completion_of_another_version_is_refused():
    evaluation = EvaluationRun(7, {0: "a"}, 1, {})
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
    assert {g.temperature for g in outcome.generators} - {None} == {0.0}
    lines = path.read_bytes().splitlines()
    samples = [msgspec.json.decode(line, type=EvaluatedSample) for line in lines]
    expected = [(prompt, i) for prompt in range(8) for i in (0, 1)]
    assert sorted((s.prompt_id, s.index) for s, _ in samples) == expected
    assert sum(v.passed for _, v in samples) / 16 == row["pass_rate"]
    assert all(v.passed == (ints(s.token_ids)[0] % 2 == 0) for s, v in samples)


def with_sets(**schedule):
    config = small_config(TWO_TASKS, **schedule)
    sets = {
        "aime": {"source": "aime2025", "every_steps": 4, "samples_per_prompt": 3},
        "lcb": {"source": "livecodebench", "every_steps": 5, "samples_per_prompt": 2},
    }
    values = config.model_dump() | {"evaluation": {**config.evaluation.model_dump(), "sets": sets}}
    return RunConfig.model_validate(values)


def curves(rows):
    """Return (name, step) of every evaluation, in the order of steps."""
    heldout = [("", row["step"]) for row in rows.evals if "sets" not in row]
    sets = [(name, row["step"]) for row in rows.evals for name in row.get("sets", ())]
    return sorted([*heldout, *sets], key=lambda one: (one[1], one[0]))


SET_CURVES = [
    ("", 0), ("aime", 0), ("lcb", 0), ("", 3), ("aime", 4), ("lcb", 5), ("", 6), ("aime", 8),
    ("lcb", 10), ("", 12), ("aime", 12), ("lcb", 12),
]  # fmt: skip


def test_each_set_is_evaluated_at_its_own_steps_in_rows_of_its_own():
    outcome = run(with_sets(), slowness=0.01)
    assert curves(outcome.rows) == SET_CURVES
    for row in outcome.rows.evals:
        if "sets" in row:
            ((name, part),) = row["sets"].items()
            assert "pass_rate" not in row and "tasks" not in row
            assert part["num_prompts"] == 3
            assert part["samples_per_prompt"] == {"aime": 3, "lcb": 2}[name]
            assert 0 <= part["pass_rate"] <= 1 and part["pass_rate_stderr"] > 0
            assert {*part, *row} <= {*METRICS}
        else:
            assert row["num_prompts"] == 8 and set(row["tasks"]) == {"arithmetic", "sums"}
        assert row["compute_tokens"] >= 0 and row["eval_seconds"] > 0
    # Evaluations of one version have the compute of this version.
    at_12 = {row["compute_tokens"] for row in outcome.rows.evals if row["step"] == 12}
    assert len(at_12) == 1
    # No generator left out a version that a set needs.
    for generator in outcome.generators:
        assert {step for _, step in SET_CURVES} <= {*generator.versions}


def test_a_resumed_run_makes_up_a_sets_evaluation_and_goes_on_with_its_curve(tmp_path):
    first = run(with_sets(), directory=tmp_path, save_before=6, stop_before=6, slowness=0.03)
    made = curves(first.rows)
    assert ("aime", 0) in made
    # With what the interrupt cut off: a curve with a gap has a point at the first step instead.
    rest = run(with_sets(), directory=tmp_path, resume=True, evaluated=made)
    expected = [one for one in SET_CURVES if one[1] >= 6]
    late = {name for name, step in SET_CURVES if step < 6 and (name, step) not in made}
    assert sorted(curves(rest.rows)) == sorted({*expected, *((name, 6) for name in late)} - {*made})
    # A set that is new counts from this step; one that changed under its name is refused.
    new = run(with_sets(), directory=tmp_path, resume=True, evaluated={("", 0), ("", 3)})
    assert curves(new.rows)[0:3] == [("", 6), ("aime", 6), ("lcb", 6)]
    same = {"aime": "3 of aime", "lcb": "3 of lcb"}
    assert load_state(tmp_path, "fingerprint", 3, same).sets == same
    load_state(tmp_path, "fingerprint", 3, {"math": "another set"})
    with pytest.raises(ConfigError, match=r"evaluation.sets.lcb had other questions"):
        load_state(tmp_path, "fingerprint", 3, {"lcb": "now"})


def test_evaluations_are_known_again_from_the_file_of_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as w:
        w.write("eval", {"step": 0, "pass_rate": 0.1})
        w.write("sets", {"step": 4, "sets": {"aime": {"pass_rate": 0.1}}})
        w.write("step", {"step": 4, "tasks": {"sums": {}}})
        w.write("sets", {"step": 5, "sets": {"lcb": {"pass_rate": 0.1}}})
    assert evaluations_in(read_metrics(path)) == {("", 0), ("aime", 4), ("lcb", 5)}
    MetricsWriter(path, resume_step=4).close()
    assert evaluations_in(read_metrics(path)) == {("", 0), ("aime", 4)}
    dropped = read_metrics(tmp_path / "metrics.dropped-0.jsonl")
    assert [(row["kind"], row["step"]) for row in dropped] == [("step", 4), ("sets", 5)]
