"""Measures of a run: compute, waiting, transfers; one row per step and per evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from megatron_rl import messages as m
from megatron_rl.orchestrator.verification import Verification


class Sink(Protocol):
    """Where rows go: metrics.jsonl first, then its mirrors and the terminal."""

    def step(self, row: dict[str, Any]) -> None: ...
    def eval(self, row: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...


class Meter:
    """Collects what a row needs from several messages and writes the row once.

    Args:
        sink: receiver of complete rows.
        ranks: ranks of trainer and generators, for device hours.
        evaluated_steps: evaluations that metrics.jsonl holds already (a resumed run).
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sink: Sink,
        ranks: int,
        evaluated_steps: set[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sink, self._ranks, self._clock = sink, ranks, clock
        self.evaluated_steps = evaluated_steps or set()
        self.active_parameters = 0
        self.aborted = 0
        self._aborted_before = 0
        self._aborted_by: dict[str, int] = {}
        self._made = clock()
        self._started: float | None = None
        self._wall_before = 0.0
        self._training_seconds = 0.0
        self._last_step_end: float | None = None
        self._counters = {"tokens": 0.0, "flops": 0.0, "evaluation_seconds": 0.0}
        self._batches: dict[int, dict[str, Any]] = {}
        self._updates: list[m.WeightsUpdated] = []
        self._publish_seconds = 0.0
        self._stats: list[m.GeneratorStats] = []
        self._probe_errors: list[np.ndarray] = []
        self._verifiers: dict[str, int] = {}
        self._evaluating: set[str] = set()
        self._evaluation_start = 0.0

    # ------------------------------------------------------------ clocks and counters

    def start_clock(self) -> None:
        """All engines are up: compute counts from here."""
        if self._started is None:
            self._started = self._last_step_end = self._clock()

    def wall_seconds(self, now: float | None = None) -> float:
        """Seconds of the RL stage, over all resumptions."""
        now = self._clock() if now is None else now
        return self._wall_before + (0.0 if self._started is None else now - self._started)

    def _evaluation_seconds(self, now: float | None = None) -> float:
        now = self._clock() if now is None else now
        running = now - self._evaluation_start if self._evaluating else 0.0
        return self._counters["evaluation_seconds"] + running

    def compute(self) -> dict[str, float]:
        """Compute spent on training so far, in the names of metrics.jsonl."""
        now = self._clock()
        # While an evaluation runs the difference stands still, up to rounding: it never falls.
        training = self.wall_seconds(now) - self._evaluation_seconds(now)
        self._training_seconds = max(self._training_seconds, training)
        return {
            "compute_tokens": self._counters["tokens"],
            "compute_flops": self._counters["flops"],
            "compute_device_hours": self._training_seconds * self._ranks / 3600,
            "wall_seconds": self.wall_seconds(now),
        }

    def counters(self) -> dict[str, float]:
        """What a checkpoint keeps, beside wall seconds and aborted requests."""
        return {**self._counters, "evaluation_seconds": self._evaluation_seconds()}

    def restore(self, counters: dict[str, float], wall_seconds: float, aborted: int) -> None:
        """Go on from a checkpoint."""
        self._counters = dict(counters)
        self._wall_before, self._aborted_before = wall_seconds, aborted
        self.aborted = aborted

    def phases(self) -> dict[str, float]:
        """Wall seconds by phase, from the start of this process on."""
        evaluation = self._evaluation_seconds()
        up = self._started if self._started is not None else self._clock()
        return {
            "engines": up - self._made,
            "rl": self.wall_seconds() - evaluation,
            "evaluation": evaluation,
        }

    # ------------------------------------------------------------ what is heard

    def batch(self, step: int, rollouts: dict[str, Any]) -> None:
        """A batch went to the trainer."""
        self._batches[step] = rollouts

    def published(self, published: m.Published) -> None:
        """The trainer exported a version."""
        self._publish_seconds = published.seconds

    def updated(self, updated: m.WeightsUpdated) -> None:
        """An engine took a version."""
        self._updates.append(updated)

    def generator(self, name: str, stats: m.GeneratorStats) -> None:
        """An engine's second."""
        self._stats.append(stats)
        self._aborted_by[name] = stats.aborted
        self.aborted = self._aborted_before + sum(self._aborted_by.values())

    def verifiers(self, verification: Verification) -> None:
        """How far behind the verifiers are, and how their processes fare."""
        if (pool := verification.pool) is not None:
            self._verifiers = {
                "verifier_waiting": verification.waiting,
                "verifier_deaths": pool.stats.deaths,
                "verifier_bugs": pool.stats.bugs,
            }

    def probe(self, trainer: list[list[float]], generator: list[list[float]]) -> None:
        """Log-probs of the same tokens under the same weights, from both sides."""
        self._probe_errors.extend(
            np.abs(np.array(t) - np.array(g)) for t, g in zip(trainer, generator, strict=True)
        )

    def evaluation_started(self, engine: str) -> None:
        """An engine holds its version for an evaluation."""
        if not self._evaluating:
            self._evaluation_start = self._clock()
        self._evaluating.add(engine)
        self.sink.note("evaluating")

    def evaluation_ended(self, engine: str) -> None:
        """The engine's share is done."""
        seconds = self._evaluation_seconds()
        self._evaluating.discard(engine)
        if not self._evaluating:
            self._counters["evaluation_seconds"] = seconds

    # ------------------------------------------------------------ rows

    def step(self, done: m.StepDone) -> None:
        """Write the row of a trained step."""
        rollouts = self._batches.pop(done.step)
        trainer = dict(done.metrics)
        logprob_error = self._logprob_error(trainer)
        tokens = rollouts["tokens"]
        flops = 2 * tokens + 6 * trainer["tokens_trained"]
        self._counters["tokens"] += tokens
        self._counters["flops"] += flops * self.active_parameters
        now = self._clock()
        step_seconds = max(now - (self._last_step_end or now), 1e-9)
        self._last_step_end = now
        row = {
            "step": done.step,
            **self.compute(),
            **rollouts,
            **trainer,
            **logprob_error,
            "step_seconds": step_seconds,
            "trainer_tokens_per_second": tokens / step_seconds,
            "train_seconds": done.train_seconds,
            "publish_seconds": self._publish_seconds,
            # The first wait began before the engines were up.
            "trainer_wait_fraction": min(done.wait_seconds / step_seconds, 1.0),
            "aborted_requests": self.aborted,
            **self._verifiers,
            **self._generators(),
        }
        self.sink.step(row)

    def _logprob_error(self, trainer: dict[str, float]) -> dict[str, float]:
        """Single-version tokens of the batch, taken out of `trainer`, and probed ones together."""
        tokens = trainer.pop("same_version_logprob_tokens", 0.0)
        total = trainer.pop("same_version_logprob_error_mean", 0.0) * tokens
        worst = trainer.pop("same_version_logprob_error_max", 0.0)
        for errors in self._probe_errors:
            tokens, total = tokens + errors.size, total + float(errors.sum())
            worst = max(worst, float(errors.max(initial=0.0)))
        self._probe_errors.clear()
        if not tokens:
            return {}
        return {
            "logprob_error_max": worst,
            "logprob_error_mean": total / tokens,
            "logprob_error_tokens": tokens,
        }

    def _generators(self) -> dict[str, float]:
        row: dict[str, float] = {}
        if self._updates:
            for name in ("pause_seconds", "transfer_seconds"):
                row[name] = float(np.mean([getattr(u, name) for u in self._updates]))
            row["requests_in_flight"] = float(
                np.mean([u.requests_in_flight for u in self._updates])
            )
            self._updates.clear()
        seconds = sum(s.seconds for s in self._stats)
        if seconds:
            engines = max(len(self._aborted_by), 1)
            row["generator_wait_fraction"] = max(
                1 - sum(s.busy_seconds for s in self._stats) / seconds, 0.0
            )
            row["generator_tokens_per_second"] = (
                sum(s.tokens for s in self._stats) / seconds * engines
            )
            self._stats.clear()
        return row

    def evaluation(self, row: dict[str, Any]) -> None:
        """Write the row of a finished evaluation."""
        self.evaluated_steps.add(row["step"])
        self.sink.eval(row)
