"""Seconds of the loop's parts: as assumed of a GPU, or as measured in a recorded run."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.commands.plan.loop_simulation import Lengths, LoopRates, LoopTimes
from megatron_rl.commands.plan.memory import generator_memory
from megatron_rl.commands.plan.nodes import update_time
from megatron_rl.config import RunConfig, load_config
from megatron_rl.metrics.metrics_file import MetricsError, last_rows, mean, read_metrics
from megatron_rl.metrics.rollouts import read_rollouts

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

COLUMNS = [
    "kind", "step", "engine", "group", "index", "token_ids", "versions", "seconds_to_arrive",
    "unix_seconds",
]  # fmt: skip
REFINEMENTS = 8  # of the speed by which an iteration's share of a window is weighted


@dataclass(frozen=True, slots=True)
class Assumptions:
    """A GPU, by default of a GB200, and the completions; nothing here was measured."""

    peak_tflops: float = 2500.0  # dense, bf16
    mfu: float = 0.35  # share of it that training and prefill reach
    memory_tbps: float = 8.0
    bandwidth_share: float = 0.6  # of it that decoding reaches
    overhead_ms: float = 3.0  # of an iteration: scheduling, launches, sampling
    mean_tokens: float = 6000.0  # of completions, before they are cut at the longest
    sigma: float = 0.6  # of the logarithm of their lengths
    prompt_tokens: float = 300.0


def assumed_times(run: RunConfig, architecture: Architecture, a: Assumptions) -> LoopTimes:
    """Return the times of a run whose decoding is bound by memory, and training by arithmetic.

    All experts are read in every iteration.
    """
    memory, update = generator_memory(run, architecture), update_time(run, architecture)
    bandwidth, flops = a.memory_tbps * 1e12 * a.bandwidth_share, a.peak_tflops * 1e12 * a.mfu
    active, engine = architecture.active_parameters(), flops * run.roles.generator_tensor_parallel
    # Forward and backward of weights, and of causal attention to half of a completion.
    heads = architecture.layers * architecture.heads * architecture.head_dim
    trained = 6 * active + 6 * heads * a.mean_tokens
    copy = max(update.copy_by_link.values())
    return LoopTimes(
        iteration=a.overhead_ms / 1000 + memory.weights / bandwidth,
        request=2 * active / engine,
        context=memory.kv_bytes_per_sequence / run.sequence_tokens / bandwidth,
        prefill=2 * active * a.prompt_tokens / engine,
        train_token=trained / flops / run.roles.trainer_ranks,
        copy=copy,
        publish=copy + update.complete,
        travel=update.travel_differences + update.check,
        pause=max(update.pause_by_link.values()),
    )


@dataclass(frozen=True, slots=True)
class RecordedLoop:
    """A run's measured times and rates."""

    run: RunConfig
    times: LoopTimes
    lengths: Lengths  # its completions by group, over and over
    rates: LoopRates
    steps: int  # that count for the rates
    decode_error: float  # mean relative error of a completion's time by these times


def recorded_loop(folder: Path, skip: int | None = None) -> RecordedLoop:
    """Return the times and rates of a run, from its metrics and rollout files.

    The first `skip` steps do not count (default: a quarter, and more than the lag), nor do the
    last ones of a pipeline, for which nothing more was dispatched. Phases count whole.

    Raises:
        MetricsError: it has too few steps, or no rollout files of them.
    """
    run = load_config(folder / "config.yaml", [])
    lag, rows = run.schedule.max_lag_steps, read_metrics(folder / "metrics.jsonl")
    rows = last_rows(rows, "step")
    skip = max(len(rows) // 4, min(lag + 1, len(rows) // 2), 1) if skip is None else skip
    phase, first = run.schedule.updates_per_phase, rows[0]["step"] if rows else 0
    skip += -(first + skip) % phase
    idle = min(lag, (len(rows) - skip) // 2) if phase == 1 else (len(rows) - skip) % phase
    used = rows[skip : len(rows) - idle]
    if not (folder / "rollouts").is_dir():
        raise MetricsError(f"{folder} has no rollouts: train with metrics.rollouts_every_steps 1")
    table = read_rollouts(folder / "rollouts", COLUMNS).combine_chunks()
    windows = _windows(table, run.generation.concurrent_completions)
    if len(used) < 2 or not windows["train"].any():
        raise MetricsError(
            f"{folder}: {len(used)} steps after the first {skip}, {len(windows['train'])}"
            " completions in rollout files: too few to measure the loop"
        )
    first, last = rows[skip - 1], used[-1]
    # Without what evaluations and lost work took.
    names = ("wall_seconds", "compute_train_device_hours", "compute_device_hours")
    wall, train, every = (last[name] - first[name] for name in names)
    seconds = float(wall * train / every)
    tokens, lags = sum(r["tokens"] for r in used), Counter[int]()
    for row in used:
        lags.update({int(k): n for k, n in row["lag_histogram"].items()})
    inside = windows["train"] & (windows["end"] > first["unix_seconds"])
    inside &= windows["end"] <= last["unix_seconds"]
    duration = windows["end"] - windows["start"]
    rates = LoopRates(
        step_seconds=seconds / len(used),
        tokens_per_hour=3600 * tokens / seconds,
        trainer_wait=mean(used, "trainer_wait_fraction", "step_seconds") or 0.0,
        generator_wait=_mean(used, "generator_wait_fraction"),
        running=float(duration[inside].sum() / seconds / run.roles.engines),
        lag=dict(sorted(lags.items())),
    )
    pause = _mean(used, "pause_seconds")
    decode, error = _decode_times(windows, inside, pause)
    times = replace(decode, pause=pause, **_trainer_times(run, rows, used, windows, pause))
    return RecordedLoop(run, times, _lengths(windows), rates, len(used), error)


def _mean(rows: list[Any], name: str) -> float:
    return mean(rows, name, "") or 0.0


def _windows(table: Any, capacity: int) -> dict[str, NDArray[Any]]:
    """Return for each completion when it decoded, with its tokens, group and engine.

    An engine admits those that it gets in their order, when another one ends.
    """
    ids, versions = table["token_ids"].combine_chunks(), table["versions"].combine_chunks()
    offsets = ids.offsets.to_numpy()
    labels = np.append(versions.values.to_numpy(), 0)
    begins, ends = versions.offsets.to_numpy()[:-1], versions.offsets.to_numpy()[1:]
    column = {name: table[name].to_numpy() for name in ("step", "group", "index")}
    column |= {
        "train": table["kind"].to_numpy() == "train",
        "engine": np.array([name or "" for name in table["engine"].to_pylist()]),
        "tokens": np.diff(offsets).astype(float),
        "swaps": labels[ends - 1] - labels[begins],
        "end": table["unix_seconds"].to_numpy(),
        "start": table["unix_seconds"].to_numpy() - table["seconds_to_arrive"].to_numpy(),
    }
    whole = np.isfinite(column["start"]) & (column["tokens"] > 0) & (column["engine"] != "")
    column = {name: values[whole] for name, values in column.items()}
    column["sent"] = column["start"].copy()
    for engine in np.unique(column["engine"]):
        running: list[float] = []
        own = np.flatnonzero(column["engine"] == engine)
        for i in own[np.argsort(column["sent"][own], kind="stable")]:
            if len(running) == capacity:
                column["start"][i] = max(column["start"][i], heapq.heappop(running))
            heapq.heappush(running, column["end"][i])
    return column


def _decode_times(
    windows: dict[str, NDArray[Any]], inside: NDArray[np.bool_], pause: float
) -> tuple[LoopTimes, float]:
    """Fit the times of decoding to the windows `inside`; return the mean relative error, too.

    A completion of L tokens takes `L * iteration + (sum of the running requests over its
    iterations) * request + (prompts that came meanwhile) * prefill`.
    """
    from scipy.optimize import nnls

    spent = (windows["end"] - windows["start"] - pause * windows["swaps"])[inside]
    solution = np.array([1.0, 0.0, 0.0])
    for _ in range(REFINEMENTS):
        matrix = np.zeros((len(inside), 3))
        for engine in np.unique(windows["engine"]):
            own = np.flatnonzero(windows["engine"] == engine)
            start, end, tokens = (windows[name][own] for name in ("start", "end", "tokens"))
            times = np.concatenate([start, end])
            order = np.argsort(times)
            running = np.cumsum(np.repeat([1, -1], len(own))[order])[:-1]
            weight = np.diff(times[order]) / (solution[0] + solution[1] * np.maximum(running, 1))
            at = [np.searchsorted(times[order], t) for t in (start, end)]
            done, sums = (
                np.diff(np.append(0.0, np.cumsum(w))[at], axis=0)[0]
                for w in (weight, weight * running)
            )
            _, firsts = np.unique(windows["group"][own], return_index=True)
            prompts = np.sort(windows["sent"][own][firsts])
            came = np.searchsorted(prompts, end) - np.searchsorted(prompts, start - 1e-3)
            mean = sums / np.maximum(done, 1e-12)
            matrix[own] = np.stack([tokens, tokens * mean, came], axis=1)
        matrix = matrix[inside]
        solution, _ = nnls(matrix, spent)
        if not solution[:2].any():
            raise MetricsError("the times of completions do not grow with their tokens")
        solution *= spent.sum() / (matrix @ solution).sum()
    error = np.abs(matrix @ solution - spent).mean() / spent.mean()
    iteration, request, prefill = solution.tolist()
    return LoopTimes(iteration, request, prefill=prefill), float(error)


def _lengths(windows: dict[str, NDArray[Any]]) -> Lengths:
    groups: dict[int, dict[int, int]] = {}
    names = ("group", "index", "tokens", "train")
    for group, index, tokens, train in zip(*(windows[name] for name in names), strict=True):
        if train:
            groups.setdefault(int(group), {})[int(index)] = int(tokens)
    whole = max(len(group) for group in groups.values())
    tokens = [[g[i] for i in sorted(g)] for _, g in sorted(groups.items()) if len(g) == whole]
    return lambda group: tokens[group % len(tokens)]


def _trainer_times(
    run: RunConfig, rows: list[Any], used: list[Any], windows: dict[str, NDArray[Any]], pause: float
) -> dict[str, float]:
    """Return the times of the trainer and of the way of its weights.

    From the announcement to the load nothing is measured but in lock-step, where what is dispatched
    next waits for it; else it is the way to the stores of other nodes.
    """
    done = {row["step"]: row["unix_seconds"] for row in rows}
    rest, overhead, gaps = [], [], []
    for row in used:
        phase = range(row["step"], row["step"] + run.schedule.phase_steps(row["step"]))
        own = windows["train"] & np.isin(windows["step"], phase)
        wait = row["trainer_wait_fraction"] * row["step_seconds"]
        rest.append(row["step_seconds"] - row["train_seconds"] - wait)
        if own.any():
            last = row["unix_seconds"] - row["train_seconds"] - windows["end"][own].max()
            overhead.append(max(min(wait, last), 0.0))
            gaps.append(windows["sent"][own].min() - done[row["step"] - 1])
    copy, publish = max(float(np.mean(rest)), 0.0), _mean(used, "publish_seconds")
    travel = _mean(used, "stores_seconds")
    if run.schedule.mode == "synchronous":
        travel = max(float(np.mean(gaps)) - publish - pause, 0.0)
    return {
        "train_token": sum(r["train_seconds"] for r in used) / sum(r["tokens"] for r in used),
        "batch": float(np.mean(overhead)) if overhead else 0.0,
        "copy": copy,
        "publish": publish,
        "travel": travel,
    }
