"""`megatron-rl plan --simulate`: the rates of a run and of choices around it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_rl.commands.plan import loop_times
from megatron_rl.commands.plan.layouts import layout_problems
from megatron_rl.commands.plan.loop_simulation import (
    LoopRates,
    LoopSimulation,
    LoopTimes,
    lognormal,
)
from megatron_rl.commands.plan.loop_times import Assumptions, RecordedLoop
from megatron_rl.commands.plan.memory import estimate
from megatron_rl.commands.plan.tensors import read_architecture
from megatron_rl.config import ConfigError, RunConfig

SCHEMA = "megatron_rl.loop_plan/1"
TRAINERS, LAG = "roles.trainer_ranks", "schedule.max_lag_steps"
ALIKE = 0.02  # of the tokens per hour: of choices so near to the best, the smallest lag is marked
Choice = dict[str, Any]  # dotted key -> value


def loop_plan(
    run: RunConfig,
    recording: Path | None,
    assume: Sequence[str],
    vary: Sequence[str],
    steps: int,
    json_path: Path | None,
) -> None:
    """Simulate a run and choices around it, and print their rates.

    Times and lengths are those of the run in the folder `recording`, else they are assumed;
    `assume` has `name=value` of fields of `Assumptions` or `LoopTimes`. All combinations of `vary`
    (`key=value,value`) are simulated, by default one key at a time.

    Raises:
        ConfigError: an unknown name or value, or a configuration that cannot run.
        MetricsError: the recorded run has too little.
    """
    recorded = None if recording is None else loop_times.recorded_loop(recording)
    given, known = _pairs(assume), {f.name for f in fields(Assumptions)}
    a = replace(Assumptions(), **{k: v for k, v in given.items() if k in known})
    replaced = {k: v for k, v in given.items() if k not in known}
    print(*_header(run, recorded, a, replaced), sep="\n")
    results = []
    for choice in _choices(run, vary):
        problem, rates = "", None
        try:
            variant = _with(run, choice)
            times, problem = _times_of(variant, recorded, a)
            if not problem:
                size = variant.schedule.completions_per_prompt
                longest = variant.generation.completion_tokens
                lengths = lognormal(variant.seed, a.mean_tokens, a.sigma, longest, size)
                if recorded is not None and "mean_tokens" not in given:
                    lengths = recorded.lengths
                prompt, times = a.prompt_tokens * (recorded is None), replace(times, **replaced)
                rates = LoopSimulation(variant, times, lengths, prompt).rates(steps)
        except ValidationError as e:
            problem = e.errors()[0]["msg"].removeprefix("Value error, ")
        results.append((choice, rates, problem))
    print(*_table(results), sep="\n")
    if json_path is not None:
        rows = [
            {"choice": c, "problem": p, **({} if r is None else asdict(r))} for c, r, p in results
        ]
        content = {"schema": SCHEMA, "assumed": asdict(a) | replaced, "choices": rows}
        json_path.write_text(json.dumps(content, indent=1) + "\n")


def _pairs(assume: Sequence[str]) -> dict[str, float]:
    names = [f.name for kind in (Assumptions, LoopTimes) for f in fields(kind)]
    pairs = {}
    for text in assume:
        name, _, value = text.partition("=")
        if name not in names:
            raise ConfigError(f"--assume {text}: {name} is none of {', '.join(names)}")
        try:
            pairs[name] = float(value)
        except ValueError:
            raise ConfigError(f"--assume {text}: {value!r} is not a number") from None
    return pairs


def _choices(run: RunConfig, vary: Sequence[str]) -> Iterator[Choice]:
    """Yield the configuration's own choice first, without a change."""
    given: dict[str, list[Any]] = {}
    for text in vary:
        key, _, values = text.partition("=")
        section, _, name = key.partition(".")
        if name not in getattr(type(getattr(run, section, None)), "model_fields", ()):
            raise ConfigError(f"--vary {key}: no such key; `megatron-rl config` lists them")
        given[key] = [yaml.safe_load(value) for value in values.split(",")]
    yield {}
    if given:
        yield from (dict(zip(given, v, strict=True)) for v in itertools.product(*given.values()))
        return
    own, concurrent = run.roles.trainer_ranks, run.generation.concurrent_completions
    for ranks in (own // 2, own * 3 // 2, own * 2, own * 3):
        if 0 < ranks < run.roles.world_size and ranks != own:
            yield {TRAINERS: ranks}
    yield from ({LAG: lag} for lag in (1, 2, 4, 8, 16) if lag != run.schedule.max_lag_steps)
    yield {"schedule.mode": "synchronous"}
    for number in (max(concurrent // 2, 1), concurrent * 2):
        yield {"generation.concurrent_completions": number}


def _with(run: RunConfig, choice: Choice) -> RunConfig:
    """Return the run with other values; other trainer ranks leave the others to generators.

    Raises:
        ValidationError: values that do not fit together.
    """
    content = run.model_dump()
    if "schedule.mode" in choice:
        for key in ("max_lag_steps", "updates_per_phase"):
            del content["schedule"][key]
    if LAG in choice:
        content["schedule"] |= {"mode": "pipeline", "updates_per_phase": 1}
    if TRAINERS in choice:
        content["roles"]["generator_ranks"] = run.roles.world_size - choice[TRAINERS]
    for key, value in choice.items():
        section, _, name = key.partition(".")
        content[section][name] = value
    return RunConfig.model_validate(content)


def _times_of(
    run: RunConfig, recorded: RecordedLoop | None, a: Assumptions
) -> tuple[LoopTimes, str]:
    """Return the times of a variant, and why it cannot run.

    Recorded times of training are divided by the ratio of the ranks; all others stay.
    """
    if recorded is not None:
        ratio = recorded.run.roles.trainer_ranks / run.roles.trainer_ranks
        return replace(recorded.times, train_token=recorded.times.train_token * ratio), ""
    architecture = read_architecture(run)
    if not (problems := layout_problems(run, architecture)):
        memory = estimate(run, architecture)
        length = min(a.mean_tokens, run.generation.completion_tokens) + a.prompt_tokens
        held = int(memory.generator.sequences * run.sequence_tokens / length)
        problems = memory.misfits
        if held < run.generation.concurrent_completions:
            problems.append(f"the KV cache of an engine holds {held} completions of mean length")
    times = loop_times.assumed_times(run, architecture, a)
    return times, problems[0].partition(";")[0] if problems else ""


def _header(
    run: RunConfig, recorded: RecordedLoop | None, a: Assumptions, replaced: dict[str, float]
) -> list[str]:
    if recorded is not None:
        times = replace(recorded.times, **replaced)
        lines = [
            f"times of {recorded.run.output_dir}, {recorded.steps} of its steps; a completion's"
            f" time is met within {recorded.decode_error:.0%} on average",
            "  measured: " + _line(recorded.rates),
        ]
    else:
        times = replace(loop_times.assumed_times(run, read_architecture(run), a), **replaced)
        lines = ["assumptions, none of them measured (--assume NAME=VALUE):"]
        lines.append("  " + ", ".join(f"{k} {v:g}" for k, v in asdict(a).items()))
    values = ", ".join(f"{name} {value:.3g}" for name, value in asdict(times).items())
    return [*lines, f"  seconds: {values}"]


def _line(r: LoopRates) -> str:
    return (
        f"{r.steps_per_hour:,.1f} steps/h of {r.step_seconds:.4g} s,"
        f" {r.tokens_per_hour / 1e6:,.2f} M tokens/h, waiting: trainer {r.trainer_wait:.0%},"
        f" generators {abs(r.generator_wait):.0%}; {r.running:.1f} requests per engine; lag"
        f" {r.lag_mean:.1f}, at most {max(r.lag)}"
    )


def _table(results: list[tuple[Choice, LoopRates | None, str]]) -> Iterator[str]:
    """Yield a line per choice, with the best one marked, and the lag of the first one's tokens."""
    rates = [r for _, r, _ in results if r is not None]
    enough = (1 - ALIKE) * max((r.tokens_per_hour for r in rates), default=0.0)
    good = [r for r in rates if r.tokens_per_hour >= enough]
    best = min(good, key=lambda r: (max(r.lag), -r.tokens_per_hour), default=None)
    for choice, r, problem in results:
        name = " ".join(f"--{key} {value}" for key, value in choice.items()) or "as configured"
        mark = "*" if r is best and r is not None else " "
        yield f"{mark} {name:<44} {'cannot run: ' + problem if r is None else _line(r)}"
    if best is not None:
        yield f"* the most tokens an hour within {ALIKE:.0%}, with the smallest lag"
    if (own := results[0][1]) is not None:
        total = sum(own.lag.values())
        shares = ", ".join(f"{lag}: {n / total:.1%}" for lag, n in own.lag.items())
        yield f"lag of trained tokens as configured, in steps: {shares}"
