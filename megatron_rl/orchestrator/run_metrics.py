"""Measurements of a run: compute, waiting, transfers; one row per step and per evaluation."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_rl import messages as m
from megatron_rl.metrics.sink import RunSink
from megatron_rl.orchestrator.verification import Verification


class RunMetrics:
    """Collects a row's values from several messages and writes the row once.

    Device hours count `ranks`; `evaluated_steps` are in metrics.jsonl already (a resumed run).
    """

    def __init__(
        self,
        sink: RunSink,
        ranks: int,
        evaluated_steps: set[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sink, self._ranks, self._clock = sink, ranks, clock
        self.evaluated_steps = evaluated_steps or set()
        self.active_parameters = self.aborted = self._aborted_before = 0
        self.publish_seconds = 0.0
        """Seconds of the trainer's last export of weights."""
        self.updates: list[m.WeightsUpdated] = []
        """Weight updates of generators since the last row."""
        self._aborted_by: dict[str, int] = {}
        self._created = clock()
        self._started: float | None = None
        self._wall_before = self._training_seconds = self._evaluation_start = 0.0
        self._last_step_end: float | None = None
        self._counters = {"tokens": 0.0, "flops": 0.0, "evaluation_seconds": 0.0}
        self._batches: dict[int, dict[str, Any]] = {}
        self._stores: dict[str, float] = {}
        self._stats: list[m.GeneratorStats] = []
        self._trainer_logprobs: dict[int, list[list[float]]] = {}
        self._probe_errors: list[np.ndarray] = []
        self._verifiers: dict[str, int] = {}
        self._evaluating: set[str] = set()

    def start_clock(self) -> None:
        """Start counting compute: all generators are up."""
        if self._started is None:
            self._started = self._last_step_end = self._clock()

    def wall_seconds(self) -> float:
        """Return the seconds of the RL stage, over all resumptions."""
        return self._wall_before + (0.0 if self._started is None else self._clock() - self._started)

    def _evaluation_seconds(self) -> float:
        running = self._clock() - self._evaluation_start if self._evaluating else 0.0
        return self._counters["evaluation_seconds"] + running

    def compute(self) -> dict[str, float]:
        """Return the compute spent on training so far, by the names of metrics.jsonl."""
        # Constant during an evaluation up to rounding; the maximum keeps it monotonic.
        training = self.wall_seconds() - self._evaluation_seconds()
        self._training_seconds = max(self._training_seconds, training)
        return {
            "compute_tokens": self._counters["tokens"],
            "compute_flops": self._counters["flops"],
            "compute_device_hours": self._training_seconds * self._ranks / 3600,
            "wall_seconds": self.wall_seconds(),
        }

    def counters(self) -> dict[str, float]:
        """Return the counters of a checkpoint, without wall seconds and aborted requests."""
        return {**self._counters, "evaluation_seconds": self._evaluation_seconds()}

    def restore(self, counters: dict[str, float], wall_seconds: float, aborted: int) -> None:
        """Restore the counters of a checkpoint."""
        self._counters, self._wall_before = dict(counters), wall_seconds
        self.aborted = self._aborted_before = aborted

    def phases(self) -> dict[str, float]:
        """Return wall seconds by phase, since the start of this process."""
        evaluation = self._evaluation_seconds()
        engines = (self._clock() if self._started is None else self._started) - self._created
        rl = self.wall_seconds() - evaluation
        return {"engines": engines, "rl": rl, "evaluation": evaluation}

    def batch(self, step: int, rollouts: dict[str, Any]) -> None:
        """Record the rollout metrics of a batch that went to the trainer."""
        self._batches[step] = rollouts

    def version_taken(self, seconds: float, num_bytes: int) -> None:
        """Record a version in a store, by what `Stores.taken` returns."""
        row = self._stores
        row["stores_seconds"] = max(row.get("stores_seconds", 0.0), seconds)
        row["stores_trainer_bytes"] = row.get("stores_trainer_bytes", 0) + num_bytes

    def generator_stats(self, name: str, stats: m.GeneratorStats) -> None:
        """Record the load of a generator."""
        self._stats.append(stats)
        self._aborted_by[name] = stats.aborted
        self.aborted = self._aborted_before + sum(self._aborted_by.values())

    def verifiers(self, verification: Verification) -> None:
        """Record the backlog and the failures of the verifiers."""
        if (pool := verification.pool) is not None:
            self._verifiers = {
                "verifier_waiting": verification.waiting,
                "verifier_deaths": pool.stats.deaths,
                "verifier_bugs": pool.stats.bugs,
            }

    def score_requested(self, done: m.StepDone) -> None:
        """Keep the trainer's log-probs until the generator's come."""
        self._trainer_logprobs[done.step] = done.probe_logprobs

    def scored(self, scores: m.Scores) -> None:
        """Compare both sides' log-probs, unless an update has changed the generator's weights."""
        trainer = self._trainer_logprobs.pop(scores.step)
        if scores.version == scores.step:
            pairs = zip(trainer, scores.logprobs, strict=True)
            self._probe_errors.extend(np.abs(np.array(t) - np.array(g)) for t, g in pairs)

    def evaluation_started(self, generator: str) -> None:
        """Note that a generator holds its version for an evaluation."""
        if not self._evaluating:
            self._evaluation_start = self._clock()
        self._evaluating.add(generator)
        self.sink.note("evaluating")

    def evaluation_ended(self, generator: str) -> None:
        """Note that a generator has returned its share of an evaluation."""
        seconds = self._evaluation_seconds()
        self._evaluating.discard(generator)
        if not self._evaluating:
            self._counters["evaluation_seconds"] = seconds

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
            "publish_seconds": self.publish_seconds,
            # The first wait began before the generators were up.
            "trainer_wait_fraction": min(done.wait_seconds / step_seconds, 1.0),
            "aborted_requests": self.aborted,
        }
        self.sink.step({**row, **self._verifiers, **self._generators()})

    def _logprob_error(self, trainer: dict[str, float]) -> dict[str, float]:
        """Merge the errors of single-version tokens, popped from `trainer`, and of the probes."""
        tokens = trainer.pop("same_version_logprob_tokens", 0.0)
        total = trainer.pop("same_version_logprob_error_mean", 0.0) * tokens
        worst = trainer.pop("same_version_logprob_error_max", 0.0)
        for errors in self._probe_errors:
            tokens, total = tokens + errors.size, total + float(errors.sum())
            worst = max(worst, float(errors.max(initial=0.0)))
        self._probe_errors.clear()
        if not tokens:
            return {}
        values = {"max": worst, "mean": total / tokens, "tokens": tokens}
        return {f"logprob_error_{name}": value for name, value in values.items()}

    def _generators(self) -> dict[str, float]:
        """Return the means over generators since the last row."""
        row, self._stores = self._stores, {}
        if self.updates:
            for name in ("pause_seconds", "transfer_seconds", "requests_in_flight"):
                row[name] = float(np.mean([getattr(u, name) for u in self.updates]))
            self.updates.clear()
        if seconds := sum(s.seconds for s in self._stats):
            busy = sum(s.busy_seconds for s in self._stats)
            row["generator_wait_fraction"] = max(1 - busy / seconds, 0.0)
            tokens = sum(s.tokens for s in self._stats)
            row["generator_tokens_per_second"] = tokens / seconds * len(self._aborted_by)
            self._stats.clear()
        return row

    def evaluation(self, row: dict[str, Any]) -> None:
        """Write the row of a complete evaluation."""
        self.evaluated_steps.add(row["step"])
        self.sink.eval(row)
