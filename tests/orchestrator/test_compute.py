"""Compute of a run: all that its devices did, and the training in it."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl import messages
from megatron_rl.config import load_config
from megatron_rl.config.sections import Roles
from megatron_rl.metrics.metrics_file import COMPUTE, SPENT, MetricsWriter, read_metrics
from megatron_rl.models import architecture, named_config
from megatron_rl.orchestrator.event_loop import Orchestrator
from megatron_rl.orchestrator.run_metrics import RunMetrics
from tests.orchestrator.peers import run, small_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "scalerl_scout.yaml"
TOTAL, TRAINING = "compute_device_hours", "compute_train_device_hours"


def seconds_counted() -> Any:
    """Return a clock that is one second later at each call: at each event of the orchestrator."""
    return itertools.count().__next__


def test_compute_flops_of_scout_count_17b_parameters_per_token() -> None:
    config = load_config(EXAMPLE, [])
    active = architecture(named_config(config.model)).active_parameters()
    assert round(active / 1e9, 1) == 17.2
    rows: list[dict[str, Any]] = []
    sink: Any = SimpleNamespace(write=lambda kind, row: rows.append(row))
    metrics = RunMetrics(sink, config.roles)
    metrics.active_parameters = active
    metrics.spend_tokens(0, 50)
    metrics.batch(0, {"tokens": 1000, "completions": 10, "verdicts": {}})
    metrics.step(
        messages.StepDone(
            step=0,
            metrics={"tokens_trained": 900.0},
            probe_logprobs=[],
            wait_seconds=0.0,
            train_seconds=1.0,
        )
    )
    # Two per parameter for a generated token, six for a trained one.
    training = (2 * 1000 + 6 * 900) * active
    assert rows[0]["compute_train_flops"] == training
    assert rows[0]["compute_flops"] == training + 2 * 50 * active
    assert (rows[0]["compute_train_tokens"], rows[0]["compute_tokens"]) == (1000, 1050)


def test_an_evaluation_has_its_share_of_generators_and_of_a_trainer_that_waits() -> None:
    split = Roles(trainer_ranks=2, generator_ranks=6)
    one = Roles(trainer_ranks=1, generator_ranks=1, one_gpu=True)
    cases = [  # roles, share of the evaluation, trainer waits, device-seconds of training in 10 s
        (split, 0.0, False, 80),
        (split, 0.0, True, 80),  # a wait for training's own completions
        (split, 0.25, False, 80 - 0.25 * 60),
        (split, 0.25, True, 80 - 0.25 * 80),
        (split, 1.0, False, 20),
        (split, 1.0, True, 0),
        (one, 0.25, False, 10),  # the card trains
        (one, 0.25, True, 7.5),
    ]
    for roles, share, waits, training in cases:
        sink: Any = None
        metrics = RunMetrics(sink, roles, clock=iter([0.0, 3.0, 13.0]).__next__)
        metrics.start_clock()  # the first three seconds are the start of the engines
        metrics.advance(share, waits)
        spent, total = metrics.compute(), 10 * roles.devices
        assert spent[TRAINING] == pytest.approx(training / 3600, abs=1e-12), (share, waits)
        assert spent[TOTAL] == pytest.approx(total / 3600), (share, waits)
        assert spent["wall_seconds"] == 10
        evaluation = 10 * (total - training) / total
        phases = {"engines": 3, "rl": 10 - evaluation, "evaluation": evaluation}
        assert metrics.phases == pytest.approx(phases), (share, waits)


@pytest.mark.parametrize("slowness", [0.002, 0.02])
def test_no_step_is_free_and_what_is_no_training_is_the_share_of_evaluations(slowness, monkeypatch):
    # Each second, counted by the clock, is recorded with the work in flight at that time.
    seconds, over_at = [], []
    advance = Orchestrator._advance_clock

    def record(self):
        left, all_of_them = (
            sum(getattr(g, name) for g in self.generators)
            for name in ("evaluations_left", "in_flight")
        )
        over = self.trainer_done is not None
        waits = over or self.requested_step is not None
        over_at.extend([self.metrics.compute()[TRAINING]] * over)
        if self.metrics._last_step_end is not None:
            seconds.append((left, all_of_them, waits, over))
        advance(self)

    monkeypatch.setattr(Orchestrator, "_advance_clock", record)
    config = small_config(max_lag_steps=4)
    outcome = run(config, slowness=slowness, clock=seconds_counted())
    steps, evals = outcome.rows.steps, outcome.rows.evals
    for name in (TOTAL, TRAINING):
        spent = [0.0, *(row[name] for row in steps)]
        assert all(a < b for a, b in itertools.pairwise(spent)), name
        assert [row[name] for row in evals] == [spent[row["step"]] for row in evals]
    roles, counted = config.roles, outcome.orchestrator.metrics.compute()
    assert counted["wall_seconds"] == len(seconds)
    assert counted[TOTAL] == pytest.approx(len(seconds) * roles.devices / 3600)
    shares = [
        (1.0 if over else left / max(all_of_them, 1))
        * (roles.generator_ranks + roles.trainer_ranks * waits)
        for left, all_of_them, waits, over in seconds
    ]
    assert counted[TOTAL] - counted[TRAINING] == pytest.approx(sum(shares) / 3600)
    # Some of them overlap with training; the last one has all devices after the last step.
    assert any(0 < left < all_of_them and not waits for left, all_of_them, waits, _ in seconds)
    assert len(over_at) > 3 and set(over_at) == {counted[TRAINING]}
    evaluated = sum(row["eval_completion_tokens_mean"] * row["num_prompts"] for row in evals)
    evaluated *= config.evaluation.samples_per_prompt
    tokens = counted["compute_tokens"] - counted["compute_train_tokens"]
    assert tokens == pytest.approx(evaluated)
    assert counted["compute_train_tokens"] == sum(row["tokens"] for row in steps)


def test_after_a_resume_compute_goes_on_and_lost_work_stays_spent(tmp_path):
    config, path = small_config(), tmp_path / "metrics.jsonl"
    kept = {"directory": tmp_path, "clock": seconds_counted()}
    killed = run(config, save_before=5, stop_before=8, **kept).rows  # steps 5-7 are lost
    with closing(MetricsWriter(path)) as writer:
        for row in killed.steps:
            writer.write("step", row)
        for row in killed.evals:
            writer.write("eval", row)
    for _ in range(2):  # it is killed again before it writes a row
        MetricsWriter(path, resume_step=5).close()
    written = read_metrics(path)
    rest = run(config, resume=True, written=written, **kept).rows
    first, last, again = killed.steps[4], killed.steps[7], rest.steps[0]
    for name in COMPUTE:
        assert again[name] > (last if name in SPENT else first)[name], name
    assert again["compute_train_tokens"] == first["compute_train_tokens"] + again["tokens"]
    lost = sum(row["tokens"] for row in killed.steps[5:])
    evaluated = last["compute_tokens"] - last["compute_train_tokens"]
    assert again["compute_tokens"] - again["compute_train_tokens"] >= lost + evaluated
    for name in COMPUTE:
        spent = [row[name] for row in rest.steps]
        assert spent == sorted(set(spent)), name
