"""`megatron-rl train --replay RUN`: the batches of a run again, from its rollout files.

`plan_replay` refuses what cannot be replayed before anything starts. On trainer rank 0, `Replay`
takes the place of the client of an orchestrator. Nothing is written below RUN.
"""

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_rl import messages as m
from megatron_rl.config import CONFIG_FILE, ConfigError, RunConfig, load_config
from megatron_rl.metrics.metrics_file import MetricsError, MetricsWriter
from megatron_rl.metrics.rollouts import read_rollouts, steps_of
from megatron_rl.metrics.sink import RunSink
from megatron_rl.orchestrator.batching import TrainedSample, batch_of

_ARRAYS = ("prompt_token_ids", "token_ids", "logprobs", "versions", "origins")
_PLAIN = ["group", "index", "prompt_id", "finish_reason"]
_PLAIN += ["advantage", "turn_advantages", "loss_weight", "trained"]


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """A replay that can begin: the steps `first` to `end - 1` of the folder `run`."""

    run: Path
    config: RunConfig  # the run's, with the replay's changes; without generators
    first: int
    end: int

    @property
    def checkpoint(self) -> Path | None:
        """The run's checkpoint of the first step; None for its start checkpoint."""
        return self.run / "checkpoints" / f"step_{self.first:06d}" if self.first else None


def plan_replay(run: Path, steps: str | None, overrides: list[str]) -> ReplayPlan:
    """Return the replay of the steps `A-B` (both are trained; None: all that were recorded).

    `overrides` are dotted options on top of the run's own configuration.

    Raises:
        ConfigError: names what is missing, or does not fit, and the remedy.
    """
    alone = ["--roles.generator_ranks", "0", "--roles.one_gpu", "false"]
    alone += ["--metrics.rollouts_ratios", "false"]  # it writes no rollout files
    recorded = load_config(run / CONFIG_FILE)
    config = load_config(run / CONFIG_FILE, [*overrides, *alone])
    own, a = config.output_dir.resolve(), config.algorithm
    if any(own.is_relative_to(x.resolve()) for x in (run, recorded.output_dir)):
        raise ConfigError(
            f"--replay: output_dir is {config.output_dir}, in the folder of the run itself: a"
            " replay writes its own checkpoints and metrics; give it another (--output_dir)"
        )
    if a.routing_replay == "replay":
        raise ConfigError(
            "--replay: algorithm.routing_replay is 'replay', and rollout files have no routed"
            " experts: with --algorithm.routing_replay none the trainer's own routers choose, and"
            " the updates differ from the run's"
        )
    a.routing_replay = "none"  # `compare` only counts
    made = config.model_copy(update={"output_dir": run}).made_start
    if made is not None:  # by the run
        config.start_checkpoint, config.sft.first = made, False
    plan = ReplayPlan(run, config, *_range(run, recorded, steps))
    needed = config.schedule.phase_start(plan.first) if a.old_policy == "trainer" else plan.first
    if a.kl_coefficient and a.kl_reset_steps is not None and plan.first > a.kl_reset_steps:
        needed = min(needed, plan.first - plan.first % a.kl_reset_steps)
    if needed != plan.first:
        raise ConfigError(
            f"--steps {steps}: step {plan.first} needs log-probs under the weights of step {needed}"
            " (algorithm.old_policy, algorithm.kl_reset_steps): begin there"
        )
    there = [p.parent for p in run.glob(f"checkpoints/step_{'?' * 6}/trainer.json")]
    if plan.checkpoint is not None and plan.checkpoint not in there:
        raise ConfigError(
            f"--steps {steps}: {plan.checkpoint} is no complete checkpoint; the run has"
            f" {', '.join(sorted(p.name for p in there)) or 'none'}: begin with one, or at step 0"
        )
    return plan


def _range(run: Path, recorded: RunConfig, steps: str | None) -> tuple[int, int]:
    """Return the first step and the end of a replay, whose files are all there."""
    folder = run / "rollouts"
    there = sorted(int(path.stem[5:]) for path in folder.glob("step_*.parquet"))
    while steps is None and there and not _trained(folder, there[-1]).num_rows:
        there.pop()  # batches with nothing to learn, at the end of the run
    first, last = 0, there[-1] if there else 0
    if steps is not None:
        try:
            first, last = steps_of(steps)
        except ValueError as e:
            raise ConfigError(str(e)) from None
    if missing := sorted({*range(first, last + 1)} - {*there}):
        every = recorded.metrics.rollouts_every_steps
        why = "the run has not trained them, or metrics.rollouts_gib made it remove the oldest"
        if every != 1:
            why = f"the run recorded every {every} steps (metrics.rollouts_every_steps)"
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise ConfigError(
            f"--replay: {folder} has no files of {len(missing)} of the steps {first}-{last}:"
            f" {shown}; {why}. --steps A-B takes a part without a gap, from a checkpoint of step A"
        )
    return first, last + 1


def _trained(folder: Path, step: int) -> Any:
    """Return the table of the trained completions of a step, in the order of their batch."""
    try:
        table = read_rollouts(folder / f"step_{step:06d}.parquet", [*_ARRAYS, *_PLAIN])
    except (MetricsError, FileNotFoundError) as e:
        raise ConfigError(f"--replay: {e}") from None
    return table.filter(table["trained"])


def recorded_batch(folder: Path, step: int, *, save: bool = False) -> m.Batch:
    """Return the batch of a step as its trainer got it, without the sequences to probe.

    Raises:
        ConfigError: `folder` has no trained completion of the step, or another schema.
    """
    table = _trained(folder, step)
    if not table.num_rows:
        raise ConfigError(f"--replay: {folder} has no trained completion of step {step}")
    columns = [[row.values.to_numpy() for row in table[name]] for name in _ARRAYS]
    rows = zip(table.select(_PLAIN).to_pylist(), *columns, strict=True)
    return batch_of(step, [_trained_sample(*row) for row in rows], save=save)


def _trained_sample(
    row: dict[str, Any], prompt: Any, token_ids: Any, logprobs: Any, versions: Any, origins: Any
) -> TrainedSample:
    sample = m.Sample(
        group=row["group"], index=row["index"], prompt_id=row["prompt_id"], evaluation=-1,
        token_ids=m.int_bytes(token_ids), logprobs=m.float_bytes(logprobs),
        segments=[m.Segment(m.ORIGINS[kind], i, j) for kind, i, j in _runs(origins)],
        spans=[m.VersionSpan(version, i, j) for version, i, j in _runs(versions)],
        finish_reason=row["finish_reason"],
    )  # fmt: skip
    advantages = tuple(row["turn_advantages"] or [row["advantage"]])
    return TrainedSample(prompt.tolist(), sample, advantages, row["loss_weight"])


def _runs(values: Any) -> list[tuple[int, int, int]]:
    """Return (value, start, end) of each run of equal values."""
    starts = np.flatnonzero(np.diff(values, prepend=-1)).tolist()
    return [(int(values[i]), i, j) for i, j in pairwise([*starts, len(values)])]


class Replay:
    """Gives the recorded batches, and writes the rows of the trained steps to metrics.jsonl.

    The weights have `step` updates. Unless `resumed`, an older metrics.jsonl is moved aside.
    """

    def __init__(self, plan: ReplayPlan, step: int, *, resumed: bool) -> None:
        self._plan, self._first, self._saved_at = plan, step, time.monotonic()
        path, self._ended = plan.config.output_dir / "metrics.jsonl", self._saved_at
        writer = MetricsWriter(path, resume_step=step if resumed else None)
        self._sink = RunSink(plan.config, writer, step)
        self._sink.note(f"replay of {plan.run}: steps {step}-{plan.end - 1}")

    def next_batch(self, step: int) -> m.Batch:
        """Return the batch of this step, or a stopping one after the last."""
        if step >= self._plan.end:
            return m.Batch(step=step, stop=True)
        now, checkpoint = time.monotonic(), self._plan.config.checkpoint
        if save := step > self._first and checkpoint.is_due(step, now - self._saved_at):
            self._saved_at = now
        return recorded_batch(self._plan.run / "rollouts", step, save=save)

    def step_done(self, done: m.StepDone, wait_seconds: float) -> None:
        """Write the row of a trained step; the batch was read for `wait_seconds`."""
        now = time.monotonic()
        seconds, self._ended = max(now - self._ended, 1e-9), now
        row = {name.removeprefix("same_version_"): value for name, value in done.metrics.items()}
        row["logprob_error_tokens"] = row.pop("logprob_tokens")
        row |= {"step_seconds": seconds, "train_seconds": done.train_seconds}
        row["trainer_wait_fraction"] = min(wait_seconds / seconds, 1.0)
        self._sink.write("step", {"step": done.step, **row})

    def save_state(self, step: int, directory: str) -> None:
        """Do nothing: a checkpoint of a replay has the trainer's state alone."""

    def send(self, message: m.Message) -> None:
        """Write the message of the end as an event."""
        self._sink.write("event", {"event": "ended", **msgspec.structs.asdict(message)})

    def close(self) -> None:
        """Close metrics.jsonl and its mirrors."""
        self._sink.close()
