"""The model of the loop against closed forms: its clock, its rules, and who waits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.commands.plan.loop_simulation import (
    LoopRates,
    LoopSimulation,
    LoopTimes,
    SimulatedEngine,
    lognormal,
)
from megatron_rl.config import RunConfig

EXAMPLES = Path(__file__).parents[3] / "examples"
PROMPTS, SIZE, TOKENS = 4, 8, 100
TIMES = LoopTimes(
    0.01, request=0.001, train=3.0, batch=0.5, copy=0.25, publish=1.0, travel=0.75, pause=0.125
)


def run_of(engines: int = 1, concurrent: int = 32, **schedule: Any) -> RunConfig:
    return RunConfig.model_validate({
        "model": "tiny_dense",
        "task": {"kind": "arithmetic"},
        "roles": {"trainer_ranks": 1, "generator_ranks": engines},
        "generation": {"concurrent_completions": concurrent},
        "schedule": {"prompts_per_step": PROMPTS, "completions_per_prompt": SIZE, **schedule},
    })  # fmt: skip


def simulate(times: LoopTimes, steps: int = 20, **settings: Any) -> LoopRates:
    run = run_of(**settings)
    return LoopSimulation(run, times, lambda group: [TOKENS] * SIZE).rates(steps)


def test_in_lock_step_the_parts_of_a_step_add_up() -> None:
    r = simulate(TIMES, mode="synchronous")
    # 32 completions of 100 tokens at once, each iteration 10 + 32 ms.
    generate = TOKENS * (0.01 + 0.001 * PROMPTS * SIZE)
    step = TIMES.publish + TIMES.travel + TIMES.pause + generate + TIMES.batch + TIMES.train
    assert r.step_seconds == pytest.approx(step, rel=1e-9)
    assert r.tokens_per_hour == pytest.approx(3600 * PROMPTS * SIZE * TOKENS / step)
    assert r.trainer_wait == pytest.approx(1 - (TIMES.train + TIMES.copy) / step)
    assert r.generator_wait == pytest.approx(1 - generate / step)
    assert r.lag == {0: 20 * PROMPTS * SIZE * TOKENS}


def test_completions_beyond_the_concurrency_wait_for_others() -> None:
    whole, half = (simulate(TIMES, mode="synchronous", concurrent=n) for n in (32, 16))
    # The other 16 come after the first 16: 2 x 100 iterations of 26 ms, not 100 of 42.
    assert half.step_seconds - whole.step_seconds == pytest.approx(2 * 2.6 - 4.2, rel=1e-6)


def test_instant_training_is_bound_by_the_generators() -> None:
    times = LoopTimes(0.01, request=0.001)
    r = simulate(times, mode="pipeline", max_lag_steps=8)
    # 32 requests always run: 32 tokens in 42 ms.
    assert r.tokens_per_hour == pytest.approx(3600 * 32 / 0.042, rel=1e-3)
    assert r.generator_wait == pytest.approx(0, abs=1e-3) and r.running == pytest.approx(32)


def test_instant_engines_are_bound_by_the_trainer() -> None:
    times = LoopTimes(0.0, train=2.0, train_token=0.001, batch=0.5, copy=0.25)
    r = simulate(times, mode="pipeline", max_lag_steps=4)
    step = 2.0 + 0.001 * PROMPTS * SIZE * TOKENS + 0.5 + 0.25
    assert r.step_seconds == pytest.approx(step)
    assert r.trainer_wait == pytest.approx(0.5 / step)
    assert r.lag == {4: 20 * PROMPTS * SIZE * TOKENS}  # generated as early as the bound allows


@pytest.mark.parametrize("slow", ["travel", "pause", "publish"])
def test_a_way_of_the_weights_that_is_slower_than_training_bounds_the_steps(slow: str) -> None:
    # A version is overwritten two versions later: not before it is loaded, or even announced.
    times = replace(LoopTimes(0.0, train=1.0), **{slow: 5.0})
    assert simulate(times, max_lag_steps=8).step_seconds == pytest.approx(5.0)


def test_phases_train_what_their_first_version_made() -> None:
    r = simulate(TIMES, mode="ppo_off_policy", updates_per_phase=4)
    step = PROMPTS * SIZE * TOKENS
    assert r.lag == dict.fromkeys(range(4), 5 * step)
    generate = 4 * TOKENS * 0.042  # 128 completions, 32 at a time
    other = TIMES.publish + TIMES.travel + TIMES.pause + 4 * (TIMES.batch + TIMES.train)
    assert 4 * r.step_seconds == pytest.approx(generate + other + 3 * TIMES.copy)


@pytest.mark.parametrize("lag", [0, 1, 3, 8])
def test_the_lag_is_never_over_its_bound(lag: int) -> None:
    lengths, run = lognormal(1, 60, 0.8, 300, SIZE), run_of(2, max_lag_steps=lag)
    r = LoopSimulation(run, TIMES, lengths).rates(40)
    assert max(r.lag) == lag and min(r.lag) >= 0


def test_more_lag_is_more_overlap_up_to_the_slower_role() -> None:
    lengths = lognormal(1, 60, 0.8, 300, SIZE)
    steps = [
        LoopSimulation(run_of(2, max_lag_steps=lag), TIMES, lengths).rates(40).step_seconds
        for lag in (0, 1, 2, 8)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == pytest.approx(TIMES.train + TIMES.batch + TIMES.copy, rel=0.02)


def test_a_long_context_slows_every_iteration() -> None:
    times = LoopTimes(0.01, request=0.001, context=1e-5)
    engine = SimulatedEngine(4, times, 50.0)
    engine.add(0, [10, 30])
    seconds, contexts = 0.0, [50, 50]
    for iteration in range(30):
        running = 2 if iteration < 10 else 1
        contexts = [c + 1 for c in contexts[-running:]]
        # In the middle of the iteration, half of its own token is there.
        seconds += 0.01 + 0.001 * running + 1e-5 * (sum(contexts) - running / 2)
        if iteration == 9:
            first = engine.next_end()
            assert first == pytest.approx(seconds)
            engine.advance(first, ends=True)
            assert [(group, index) for group, index, _ in engine.ended()] == [(0, 0)]
    assert engine.next_end() == pytest.approx(seconds)


def test_tokens_have_the_version_that_made_them() -> None:
    engine = SimulatedEngine(4, LoopTimes(0.5), 0.0)
    engine.add(7, [10])
    engine.advance(2.0)
    engine.swap(3)
    engine.stop(1.0)
    engine.advance(2.5)
    assert engine.next_end() == pytest.approx(3.0 + 6 * 0.5)
    engine.advance(6.0, ends=True)
    ((group, index, spans),) = engine.ended()
    assert (group, index, dict(spans)) == (7, 0, {0: 4, 3: 6})


def test_a_seed_gives_the_same_result_and_another_seed_another() -> None:
    run, times = run_of(3, max_lag_steps=2), replace(TIMES, context=1e-6)
    first, second, other = (
        LoopSimulation(run, times, lognormal(seed, 60, 0.8, 300, SIZE)).rates(20)
        for seed in (1, 1, 2)
    )
    assert first == second != other


def test_drawn_lengths_have_their_mean_and_bound() -> None:
    tokens = [n for group in range(2000) for n in lognormal(0, 100, 0.5, 400, SIZE)(group)]
    assert sum(tokens) / len(tokens) == pytest.approx(100, rel=0.02)
    assert min(tokens) >= 1 and max(tokens) == 400
    assert math.isclose(sorted(tokens)[len(tokens) // 2], 100 * math.exp(-0.125), rel_tol=0.03)


def test_a_run_without_engines_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set roles\.generator_ranks"):
        LoopSimulation(run_of(0), TIMES, lambda group: [1] * SIZE).rates(1)


def test_the_command_compares_choices_of_the_published_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, yaml = tmp_path / "loop.json", str(EXAMPLES / "scalerl_scout.yaml")
    vary = ["--vary", "schedule.max_lag_steps=0,4", "--vary", "roles.trainer_ranks=8,16"]
    steps = ["--simulated-steps", "2", "--assume", "mean_tokens=3000", "--json", str(out)]
    with pytest.raises(SystemExit) as e:
        main(["plan", yaml, "--simulate", *vary, *steps])
    assert not e.value.code
    text = capsys.readouterr().out
    assert "assumptions, none of them measured" in text and "mean_tokens 3000" in text
    rows = json.loads(out.read_text())["choices"]
    own, *others = rows
    assert own["choice"] == {} and len(others) == 4
    assert "must divide roles.trainer_ranks" in others[0]["problem"]  # 16 expert ranks of 8
    assert "step_seconds" not in others[0]
    lock_step, pipeline = others[1], others[3]
    assert lock_step["lag"].keys() == {"0"}
    assert lock_step["tokens_per_hour"] < pipeline["tokens_per_hour"] < own["tokens_per_hour"]
    assert "* as configured" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--simulate", "--assume", "speed=1"], "speed is none of peak_tflops"),
        (["--simulate", "--assume", "mfu=fast"], "'fast' is not a number"),
        (["--simulate", "--vary", "schedule.speed=1"], "--vary schedule.speed: no such key"),
        (["--assume", "mfu=0.5"], "belong to --simulate"),
    ],
)
def test_unknown_names_and_values_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        main(["plan", str(EXAMPLES / "scalerl_8b.yaml"), *options])
    assert e.value.code
    assert message in capsys.readouterr().err
