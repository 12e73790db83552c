"""Measurements of a run: compute, waiting, transfers; one row per step and per evaluation."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rl import messages as m
from megatron_rl.config.sections import Roles
from megatron_rl.metrics.alarms import Alarms, mismatch
from megatron_rl.metrics.metrics_file import COMPUTE, SPENT, Row
from megatron_rl.metrics.sink import RunSink
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.generators import GeneratorState
from megatron_rl.orchestrator.recording import Recorder


class RunMetrics:
    """Collects a row's values from several messages and writes the row once.

    metrics.jsonl has `rows` already (a resumed run). `advance` is the only clock. All devices of
    the roles count from the first request of the RL stage on. Of an interval, an evaluation has its
    fraction of the completions that all generators have in flight: of the generators' time always,
    and of the trainer's time while the trainer waits for a batch. On one GPU (`roles.one_gpu`) all
    time is the trainer's.
    """

    def __init__(
        self,
        sink: RunSink,
        roles: Roles,
        rows: Sequence[Row] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sink, self.rows, self._clock = sink, rows, clock
        self._roles, self.engines = roles, roles.engines  # engines whose devices count
        self.trained_steps = 0
        self.engines_ready = 0  # generators that get work
        self._lost = 0  # generators since the last row
        self._failed_rollouts, self._dropped_rollouts = Counter[str](), 0  # since the last row
        self.active_parameters = self.aborted = 0
        self.max_logprob_error = math.inf  # mean of both sides' log-probs that ends the run [nats]
        self._empty_batches = 0  # since the last step
        self.publish_seconds = 0.0  # seconds of the trainer's last export of weights
        self.updates: list[m.WeightsUpdated] = []  # weight updates of generators since the last row
        self._aborted_by: dict[str, int] = {}
        self.recorder = Recorder()  # of rollout files; this one writes none
        self._now = clock()
        self._last_step_end: float | None = None
        self._compute = dict.fromkeys(COMPUTE, 0.0)
        self.phases = {"engines": 0.0, "rl": 0.0, "evaluation": 0.0}  # wall seconds of this process
        self._batches: dict[int, dict[str, Any]] = {}
        self._stores: dict[str, float] = {}
        self._stats: dict[str, list[m.GeneratorStats]] = {}  # by generator
        self._trainer_logprobs: dict[int, list[list[float]]] = {}
        self._probe_errors: list[np.ndarray] = []
        self._alarms = Alarms()

    def start_clock(self) -> None:
        """Start counting device hours: a generator gets its first request."""
        if self._last_step_end is None:
            self.advance(0.0, False)
            self._last_step_end = self._now

    def advance(self, evaluation_share: float, trainer_waits: bool) -> None:
        """Move the clock to now; evaluations had this share of the completions in flight."""
        now = self._clock()
        seconds, self._now = now - self._now, now
        if self._last_step_end is None:
            self.phases["engines"] += seconds
            return
        devices, trainers = self._roles.devices, self._roles.trainer_ranks
        if not self._roles.one_gpu:
            devices = trainers + self.engines * self._roles.generator_tensor_parallel
        shared = devices - trainers * (not trainer_waits)
        evaluation = evaluation_share * shared / devices * seconds
        hours = devices / 3600
        self._spend("device_hours", (seconds - evaluation) * hours, evaluation * hours)
        self._compute["wall_seconds"] += seconds
        self.phases["evaluation"] += evaluation
        self.phases["rl"] += seconds - evaluation

    def _spend(self, measure: str, training: float, evaluation: float = 0.0) -> None:
        self._compute[f"compute_{measure}"] += training + evaluation
        self._compute[f"compute_train_{measure}"] += training

    def spend_tokens(self, training: int, evaluation: int = 0) -> None:
        """Count the tokens of completions."""
        self._spend("tokens", training, evaluation)
        flops = 2 * self.active_parameters  # of a token
        self._spend("flops", flops * training, flops * evaluation)

    def compute(self) -> dict[str, float]:
        """Return the compute spent so far, by the names of metrics.jsonl."""
        return dict(self._compute)

    def restore(self, compute: dict[str, float], aborted: int) -> None:
        """Restore the counters of a checkpoint; lost work that metrics.jsonl names stays spent."""
        self._compute = dict(compute)
        for name in SPENT:
            self._compute[name] = max(row.get(name, 0.0) for row in [compute, *self.rows])
        self.aborted = aborted

    def batch(self, step: int, rollouts: dict[str, Any]) -> None:
        """Record the rollout metrics of a batch that went to the trainer."""
        self._batches[step] = rollouts

    def empty_batch(self, step: int, rollouts: dict[str, Any]) -> int:
        """Write the event of a batch that was skipped; return how many were so in a row."""
        self._empty_batches += 1
        self.spend_tokens(rollouts["tokens"])
        alarms = self._alarms.check(rollouts)
        row = {"step": step, "event": "empty_batch", **self.compute(), **rollouts}
        self.sink.write("event", {**row, "alarms": alarms} if alarms else row)
        self._show_samples()
        self.sink.note(
            f"step {step}: no prompt of the batch has two rewards; it is skipped"
            f" ({self._empty_batches} in a row)"
        )
        return self._empty_batches

    def generator_ready(self, name: str, process: str, seconds: float) -> None:
        """Write the event of a generator that gets work; it joined, or was lost, so long ago."""
        row = {"generator": name, "process": process, "recovery_seconds": seconds}
        self._event("generator_ready", row)

    def generator_lost(
        self, generator: GeneratorState, reason: str, again: int, begun: list[int], *, lost: bool
    ) -> None:
        """Write the event of a generator that is gone, lost or by itself, and print it.

        Of its completions, `again` are made again, and those with `begun` tokens continued.
        """
        name, process, act = generator.name, generator.process, generator.act()
        self._lost += lost
        self._aborted_by.pop(name, None)
        row = {
            "generator": name, "process": process, "reason": reason, "last_act": act,
            "completions_again": again, "completions_continued": len(begun),
            "tokens_continued": sum(begun),
        }  # fmt: skip
        self._event("generator_lost" if lost else "generator_left", row)
        count = again + len(begun)
        work = f"; {count} completions go to others" if count else ""
        self.sink.note(f"{name} ({process}) {'is lost' if lost else 'left'}: {reason}; {act}{work}")

    def group_failed(self, index: int, prompt_id: int, losses: int) -> None:
        """Write the event of a prompt that is dropped, and print it."""
        self._event("prompt_failed", {"prompt_ids": [prompt_id]})
        self.sink.note(
            f"prompt {prompt_id} (group {index}) is dropped: {losses} generators were lost while"
            " they had it in work (fleet.group_attempts)"
        )

    def rollout_failed(self, failed: m.RolloutFailed, dropped: bool) -> None:
        """Count a rollout that failed; write the event of one that is dropped, and print it."""
        self._failed_rollouts[failed.cause] += 1
        self._dropped_rollouts += dropped
        if dropped:
            row = {"prompt_ids": [failed.prompt_id], "reason": f"{failed.cause}: {failed.reason}"}
            self._event("rollout_dropped", row)
            self.sink.note(
                f"completion {failed.index} of prompt {failed.prompt_id} is dropped after the"
                f" failures of rollout.attempts: {failed.cause}: {failed.reason}"
            )

    def _event(self, name: str, row: Row) -> None:
        self.sink.write("event", {"step": self.trained_steps, "event": name, **row})

    def version_taken(self, seconds: float, num_bytes: int) -> None:
        """Record a version in a store, by what `Stores.taken` returns."""
        row = self._stores
        row["stores_seconds"] = max(row.get("stores_seconds", 0.0), seconds)
        row["stores_trainer_bytes"] = row.get("stores_trainer_bytes", 0) + num_bytes

    def generator_stats(self, name: str, stats: m.GeneratorStats) -> None:
        """Record the load of a generator."""
        self._stats.setdefault(name, []).append(stats)
        self.aborted += stats.aborted - self._aborted_by.get(name, 0)
        self._aborted_by[name] = stats.aborted

    def score_requested(self, done: m.StepDone) -> None:
        """Keep the trainer's log-probs until the generator's come."""
        self._trainer_logprobs = {done.step: done.probe_logprobs}  # an older answer was lost

    def scored(self, scores: m.Scores) -> None:
        """Compare both sides' log-probs, unless an update has changed the generator's weights."""
        trainer = self._trainer_logprobs.pop(scores.step, None)
        if trainer is not None and scores.version == scores.step:
            pairs = zip(trainer, scores.logprobs, strict=True)
            self._probe_errors.extend(np.abs(np.array(t) - np.array(g)) for t, g in pairs)

    def step(self, done: m.StepDone, verifiers: Mapping[str, int] = {}) -> None:
        """Write the row of a trained step, with `Verification.metrics`.

        Raises:
            RunError: trainer and generators computed different log-probs (`max_logprob_error`).
        """
        self.recorder.trained(done)
        rollouts, trainer = self._batches.pop(done.step), dict(done.metrics)
        logprob_error = self._logprob_error(trainer)
        tokens = rollouts["tokens"]
        self.spend_tokens(tokens)
        self._spend("flops", 6 * trainer["tokens_trained"] * self.active_parameters)
        step_seconds = max(self._now - (self._last_step_end or self._now), 1e-9)
        self._last_step_end = self._now
        row = {
            "step": done.step, **self.compute(), **rollouts, **trainer, **logprob_error,
            "step_seconds": step_seconds, "trainer_tokens_per_second": tokens / step_seconds,
            "train_seconds": done.train_seconds, "publish_seconds": self.publish_seconds,
            # The first wait began before the generators were up.
            "trainer_busy_fraction": min(done.train_seconds / step_seconds, 1.0),
            "trainer_wait_fraction": min(done.wait_seconds / step_seconds, 1.0),
            "aborted_requests": self.aborted, "empty_batches": self._empty_batches,
            "generators": self.engines_ready, "generators_lost": self._lost,
        }  # fmt: skip
        if self._failed_rollouts:
            row["rollouts_failed"] = dict(sorted(self._failed_rollouts.items()))
            row["rollouts_dropped"] = self._dropped_rollouts
        self._failed_rollouts, self._dropped_rollouts = Counter(), 0
        self._empty_batches = self._lost = 0
        self.trained_steps = done.step + 1
        alarms = self._alarms.check(row)
        row |= {"alarms": alarms} if alarms else {}
        self.sink.write("step", {**row, **verifiers, **self._generators()})
        self._show_samples()
        if problem := mismatch(row, self.max_logprob_error):
            raise RunError(problem)

    def _show_samples(self) -> None:
        if samples := self.recorder.take_samples():
            self.sink.samples(samples)

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
        stats = [one for several in self._stats.values() for one in several]
        if seconds := sum(s.seconds for s in stats):
            busy, tokens = sum(s.busy_seconds for s in stats), sum(s.tokens for s in stats)
            row["generator_wait_fraction"] = max(1 - busy / seconds, 0.0)
            row["generator_tokens_per_second"] = tokens / seconds * len(self._stats)
            self._stats.clear()
        return row
