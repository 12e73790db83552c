"""Times of the loop: from recorded runs, which the model must meet, and from assumptions.

`recorded` has three runs of 24 steps of a tiny model, one per mode (benchmarks/async.py), with what
is read of them; the token ids are zeros. The machine had other work, more and less of it, above all
during the one of `pipeline`: its times were not the same throughout.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.cli import main
from megatron_rl.commands.plan.loop_simulation import LoopRates, LoopSimulation
from megatron_rl.commands.plan.loop_times import (
    Assumptions,
    _decode_times,
    assumed_times,
    recorded_loop,
)
from megatron_rl.config import load_config
from megatron_rl.metrics.metrics_file import MetricsError, last_rows, read_metrics
from megatron_rl.models import architecture, named_config

RECORDED = Path(__file__).parent / "recorded"
SKIP = 8
EXAMPLES = Path(__file__).parents[3] / "examples"


def both(mode: str) -> tuple[LoopRates, LoopRates]:
    """Return the rates that a run measured, and those of the model with its times."""
    loop = recorded_loop(RECORDED / mode, SKIP)
    return loop.rates, LoopSimulation(loop.run, loop.times, loop.lengths).rates(loop.steps)


@pytest.mark.parametrize(
    ("mode", "error", "lag"),
    [("synchronous", 0.02, 0.0), ("ppo_off_policy", 0.02, 0.1), ("pipeline", 0.1, 1.0)],
)
def test_the_model_meets_a_recorded_run(mode: str, error: float, lag: float) -> None:
    measured, simulated = both(mode)
    assert simulated.step_seconds == pytest.approx(measured.step_seconds, rel=error)
    assert simulated.tokens_per_hour == pytest.approx(measured.tokens_per_hour, rel=error + 0.03)
    assert simulated.trainer_wait == pytest.approx(measured.trainer_wait, abs=0.08)
    assert simulated.lag_mean == pytest.approx(measured.lag_mean, abs=lag)


def test_phases_count_whole() -> None:
    # Phases of 4 steps: 24 steps without 6 are those of 4 phases, with one wait for completions in
    # each; so is a simulation of 13.
    loop = recorded_loop(RECORDED / "ppo_off_policy", 6)
    rows = last_rows(read_metrics(RECORDED / "ppo_off_policy" / "metrics.jsonl"), "step")
    assert loop.steps == 16
    waits = [row["trainer_wait_fraction"] > 0.5 for row in rows[8:]]
    assert waits == [True, False, False, False] * 4
    assert sum(loop.rates.lag.values()) == sum(row["tokens"] for row in rows[8:])
    simulation = partial(LoopSimulation, loop.run, loop.times, loop.lengths)
    assert simulation().rates(13) == simulation().rates(16)


def test_a_fit_recovers_the_law_of_an_engine() -> None:
    # One engine, 8 requests at a time, lengths of 20 to 120: each iteration 10 ms + 2 ms a request.
    rng, now, running = np.random.default_rng(0), 0.0, list[list[float]]()
    lengths = rng.integers(20, 121, 400).tolist()
    rows, waiting = [], list(range(400))
    while waiting or running:
        while waiting and len(running) < 8:
            index = waiting.pop(0)
            running.append([lengths[index], now, index])
        least = min(left for left, _, _ in running)
        now += least * (0.010 + 0.002 * len(running))
        for each in running:
            each[0] -= least
        rows += [(start, now, lengths[int(i)], i) for left, start, i in running if not left]
        running = [each for each in running if each[0]]
    start, end, tokens, group = np.array(rows).T
    zeros = np.zeros(400)
    windows = {
        "start": start, "end": end, "tokens": tokens, "group": group, "sent": zeros, "swaps": zeros,
        "engine": np.array(["generator-0"] * 400),
    }  # fmt: skip
    times, error = _decode_times(windows, np.ones(400, bool), 0.1)
    assert error < 0.01
    assert times.iteration + 8 * times.request == pytest.approx(0.026, rel=0.01)
    assert times.request == pytest.approx(0.002, rel=0.2)


def test_a_run_that_has_too_little_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(RECORDED / "synchronous", tmp_path / "run")
    with pytest.raises(MetricsError, match="1 steps after the first 23"):
        recorded_loop(folder, 23)
    shutil.rmtree(folder / "rollouts")
    with pytest.raises(MetricsError, match="has no rollouts"):
        recorded_loop(folder)


def test_assumed_times_add_up_by_hand() -> None:
    run = load_config(EXAMPLES / "scalerl_8b.yaml")
    dense = architecture(named_config("llama-3.1-8b"))
    n, a = 8_030_261_248, Assumptions()
    active = dense.active_parameters()
    times = assumed_times(run, dense, a)
    rate, flops = 8e12 * 0.6, 2500e12 * 0.35
    assert times.iteration == pytest.approx(0.003 + 2 * n / rate)
    assert times.request == pytest.approx(2 * active / flops)
    # Keys and values of 32 layers, 8 heads of 128, bf16.
    assert times.context == pytest.approx(2 * 32 * 8 * 128 * 2 / rate)
    attention = 6 * 32 * 4096 * 6000
    assert times.train_token == pytest.approx((6 * active + attention) / flops / 16)
    twice = assumed_times(run, dense, replace(a, memory_tbps=16.0, peak_tflops=5000.0))
    assert twice.context == times.context / 2 and twice.train_token == times.train_token / 2


def test_the_command_takes_the_times_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--vary", "schedule.max_lag_steps=4", "--simulated-steps", "8"]
    with pytest.raises(SystemExit) as e:
        main(["plan", "--simulate", "--run", str(RECORDED / "synchronous"), *options])
    assert not e.value.code
    lines = capsys.readouterr().out.splitlines()
    assert "of its steps" in lines[0] and lines[1].startswith("  measured: ")
    assert lines[4].startswith("* --schedule.max_lag_steps 4")  # faster than lock-step
