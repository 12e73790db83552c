from collections import Counter

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.config.sections import Roles
from megatron_rl.messages import Scores, StepDone, Stop
from megatron_rl.metrics import METRICS
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.groups import Group
from megatron_rl.orchestrator.run_metrics import RunMetrics
from megatron_rl.orchestrator.state import FILE, load_state, restored_groups
from tests.orchestrator.peers import Rows, run, small_config


def trained_prompts(outcome):
    return Counter(p for row in outcome.rows.steps for p in row["prompt_ids"])


def test_every_step_is_trained_once_and_in_order():
    outcome = run(small_config())
    assert [row["step"] for row in outcome.rows.steps] == list(range(12))
    assert all(len(row["prompt_ids"]) == 3 for row in outcome.rows.steps)
    names = {name for row in (*outcome.rows.steps, *outcome.rows.evals) for name in row}
    assert names <= set(METRICS)


def test_connections_that_are_cut_change_nothing():
    cut = run(small_config(), slowness=0.01, cut_every=0.08)
    whole = run(small_config())
    assert cut.connections > 6, "two generators and the trainer were hardly cut"
    assert [r["prompt_ids"] for r in cut.rows.steps] == [r["prompt_ids"] for r in whole.rows.steps]
    assert [row["step"] for row in cut.rows.steps] == list(range(12))
    assert [row["step"] for row in cut.rows.evals] == [0, 3, 6, 12]


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_no_token_is_older_than_k_steps_when_it_is_trained(lag):
    outcome = run(small_config(max_lag_steps=lag))
    assert max(row["lag_max"] for row in outcome.rows.steps) <= lag


def test_with_k_0_every_token_is_on_policy():
    outcome = run(small_config(max_lag_steps=0))
    assert {lag for row in outcome.rows.steps for lag in row["lag_histogram"]} == {"0"}


def test_generators_do_run_ahead_when_they_may():
    outcome = run(small_config(max_lag_steps=4))
    assert max(row["lag_max"] for row in outcome.rows.steps) > 1


def test_evaluations_hold_one_version_and_all_are_made():
    outcome = run(small_config())
    assert [row["step"] for row in outcome.rows.evals] == [0, 3, 6, 12]
    assert all(0 <= row["pass_rate"] <= 1 for row in outcome.rows.evals)
    compute = [row["compute_train_tokens"] for row in outcome.rows.evals]
    assert compute[0] == 0 and compute == sorted(compute)
    # tokens of the steps before the evaluated version, and no others
    tokens = [row["tokens"] for row in outcome.rows.steps]
    assert compute == [sum(tokens[: row["step"]]) for row in outcome.rows.evals]


def test_engines_skip_versions_that_are_stale_but_never_one_to_evaluate():
    outcome = run(small_config(), slowness=0.02)
    for generator in outcome.generators:
        assert generator.versions == sorted(set(generator.versions))
        assert {0, 3, 6, 12} <= set(generator.versions)


def test_no_version_is_overwritten_while_it_is_read():
    # `run` asserts it: the fake trainer looks at its readers whenever it overwrites a version
    for announce_after in (0.0, 0.05):
        outcome = run(small_config(), slowness=0.05, announce_after=announce_after)
        assert {folder for g in outcome.generators for folder in g.folders} == {""}
        assert [row["step"] for row in outcome.rows.evals] == [0, 3, 6, 12]


def test_a_first_epoch_draws_the_same_prompts_whatever_finishes_first():
    a, b = run(small_config(), seed=1), run(small_config(), seed=2, slowness=0.01)
    assert [r["prompt_ids"] for r in a.rows.steps] == [r["prompt_ids"] for r in b.rows.steps]


def test_an_interrupted_and_resumed_run_trains_the_same_prompts(tmp_path):
    config = small_config()
    whole = run(config, seed=1)
    first = run(config, seed=2, directory=tmp_path, save_before=5, stop_before=5)
    rest = run(config, seed=3, directory=tmp_path, resume=True)
    assert [row["step"] for row in first.rows.steps] == list(range(5))
    assert [row["step"] for row in rest.rows.steps] == list(range(5, 12))
    assert trained_prompts(first) + trained_prompts(rest) == trained_prompts(whole)
    assert max(row["lag_max"] for row in rest.rows.steps) <= config.schedule.max_lag_steps


def test_a_run_killed_after_its_checkpoint_trains_nothing_twice(tmp_path):
    # The checkpoint is of step 5, the run dies at step 8: steps 5-7 are trained again from it.
    config = small_config()
    first = run(config, seed=2, directory=tmp_path, save_before=5, stop_before=8)
    rest = run(config, seed=3, directory=tmp_path, resume=True)
    kept = [r["prompt_ids"] for r in first.rows.steps[:5]]
    redone = [r["prompt_ids"] for r in first.rows.steps[5:]]
    resumed = [r["prompt_ids"] for r in rest.rows.steps]
    assert resumed[:3] == redone
    assert kept + resumed == [r["prompt_ids"] for r in run(config, seed=4).rows.steps]


def test_compute_goes_on_after_a_resume(tmp_path):
    config = small_config()
    first = run(config, directory=tmp_path, save_before=5, stop_before=5)
    rest = run(config, directory=tmp_path, resume=True)
    spent = first.rows.steps[-1]["compute_train_tokens"]
    assert rest.rows.steps[0]["compute_train_tokens"] == spent + rest.rows.steps[0]["tokens"]
    assert rest.rows.steps[0]["wall_seconds"] > first.rows.steps[-1]["wall_seconds"]


def test_finished_groups_are_kept_and_not_generated_again(tmp_path):
    config = small_config(max_lag_steps=4)
    run(config, directory=tmp_path, save_before=5, stop_before=5)
    state = load_state(tmp_path, "fingerprint", 3)
    assert any(g.samples for g in state.groups)
    assert min(g.index for g in state.groups) == 15


def test_groups_that_lack_the_routes_of_a_resumed_run_are_generated_again(tmp_path):
    config = small_config(max_lag_steps=4)
    run(config, directory=tmp_path, save_before=5, stop_before=5)
    state = load_state(tmp_path, "fingerprint", 3)

    def received(routed: bool) -> list[int]:
        groups = restored_groups(state, lambda index, prompt: Group(index, prompt, 4), routed)
        assert [g.index for g in groups] == [g.index for g in state.groups]
        return [g.index for g in groups if g.samples]

    assert received(routed=False) == [g.index for g in state.groups if g.samples]
    assert received(routed=True) == []


def test_a_run_whose_generators_all_failed_ends_with_the_words_of_the_last():
    config = small_config()
    timeouts = config.timeouts.model_copy(update={"startup_seconds": 1.0})
    config = config.model_copy(update={"timeouts": timeouts})
    with pytest.raises(RunError, match=r"no generator .* ended with: out of memory on rank 2"):
        run(config, fail_after=30)


def test_an_unexpected_message_is_named_with_its_sender():
    orchestrator = run(small_config(steps=3)).orchestrator
    with pytest.raises(RunError, match="unexpected message Stop from generator-0"):
        orchestrator._handle("generator-0", Stop())


def test_another_data_set_or_step_size_is_refused_on_resume(tmp_path):
    run(small_config(), directory=tmp_path, save_before=2, stop_before=2)
    with pytest.raises(ConfigError, match="made with another data set"):
        load_state(tmp_path, "other", 3)
    with pytest.raises(ConfigError, match=r"schedule\.prompts_per_step is 4.*has 3"):
        load_state(tmp_path, "fingerprint", 4)


def test_a_torn_state_is_refused(tmp_path):
    run(small_config(), directory=tmp_path, save_before=2, stop_before=2)
    data = (tmp_path / FILE).read_bytes()
    for left in (len(data) - 7, 20, 0):
        (tmp_path / FILE).write_bytes(data[:left])
        wanted = rf"{tmp_path / FILE}: its checksum differs; take an older .* \(--resume STEP\)"
        with pytest.raises(ConfigError, match=wanted):
            load_state(tmp_path, "fingerprint", 3)
    with pytest.raises(ConfigError, match="missing"):
        load_state(tmp_path / "nowhere", "fingerprint", 3)


def test_probes_compare_both_sides_under_the_same_weights():
    # Both peers say -1.0 for every token, so the error is 0 wherever it was measured.
    outcome = run(small_config())
    checked = [row for row in outcome.rows.steps if "logprob_error_max" in row]
    assert checked and all(row["logprob_error_max"] == 0 for row in checked)
    assert all(row["logprob_error_tokens"] > 0 for row in checked)


def test_single_version_tokens_of_the_batch_and_probed_tokens_are_one_metric():
    metrics = RunMetrics(Rows(), Roles())
    metrics.start_clock()
    done = StepDone(
        step=7, metrics={}, probe_logprobs=[[-1.0, -2.0]], wait_seconds=0.0, train_seconds=0.0
    )
    for version in (7, 8):  # scores of other weights do not count
        metrics.score_requested(done)
        metrics.scored(
            Scores(step=7, version=version, logprobs=[[-1.25 if version == 7 else -9.0, -2.0]])
        )
    trained = {
        "same_version_logprob_error_max": 0.5,
        "same_version_logprob_error_mean": 0.25,
        "same_version_logprob_tokens": 6.0,
    }
    # errors .25, 0 of the probe and six of mean .25: max .5, mean (.25 + 1.5) / 8
    assert metrics._logprob_error(trained) == {
        "logprob_error_max": 0.5,
        "logprob_error_mean": 1.75 / 8,
        "logprob_error_tokens": 8.0,
    }


@pytest.mark.parametrize(
    ("mean", "tokens", "ends"), [(0.11, 50.0, True), (0.11, 49.0, False), (0.1, 5000.0, False)]
)
def test_log_probs_that_differ_end_the_run_with_the_likely_causes(mean, tokens, ends):
    metrics = RunMetrics(rows := Rows(), Roles())
    metrics.max_logprob_error = 0.1
    metrics.batch(
        7, {"tokens": 100, "verdicts": {"correct": 4, "wrong": 4}, "prompts_differing": 1}
    )
    trained = {
        "tokens_trained": 100.0,
        "same_version_logprob_error_max": 3.0,
        "same_version_logprob_error_mean": mean,
        "same_version_logprob_tokens": tokens,
    }
    done = StepDone(step=7, metrics=trained, probe_logprobs=[], wait_seconds=0.0, train_seconds=0.0)
    if ends:
        text = (
            r"step 7: .*differ by 0.11 nats .mean; max 3. over 50 tokens.*max_logprob_error.*Like"
        )
        with pytest.raises(RunError, match=text):
            metrics.step(done)
    else:
        metrics.step(done)
    assert [row["logprob_error_mean"] for row in rows.steps] == [pytest.approx(mean)]
