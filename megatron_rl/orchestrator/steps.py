"""What a trainer step takes: the stream of prompts, and the batch once its groups are complete."""

from __future__ import annotations

import math

from megatron_rl.algorithm.curriculum import Curriculum
from megatron_rl.config import RunConfig
from megatron_rl.data import PromptSet
from megatron_rl.data.mixture import Mixture, shares
from megatron_rl.orchestrator.batching import BuiltBatch, build_batch
from megatron_rl.orchestrator.errors import RunError
from megatron_rl.orchestrator.groups import GroupQueue
from megatron_rl.orchestrator.probe import PROBE_SEQUENCES
from megatron_rl.orchestrator.rollout_metrics import by_task


def prompt_stream(config: RunConfig, prompts: PromptSet) -> Mixture:
    """The tasks by their weights, each with a curriculum of its own."""
    a, weights = config.algorithm, {name: task.weight for name, task in config.tasks.items()}
    part = shares(weights, list(weights))
    streams = {
        name: Curriculum(
            size,
            config.seed + position,
            threshold=a.no_positive_resampling_threshold if a.no_positive_resampling else None,
            statistic=a.no_positive_resampling_statistic,
            at_least=math.ceil(part[name] * config.schedule.prompts_per_step),
        )
        for position, (name, size) in enumerate(prompts.sizes.items())
    }
    return Mixture(streams, prompts.sizes, weights, config.seed)


class StepBuilder:
    """Builds the batch of each step from the queue of groups.

    Args:
        config: schedule, algorithm, checkpoint and metrics.
        prompts: training prompts.
        stream: where the prompts come from, for the counts of its curricula.
        first_step: steps trained before this start of the run.
    """

    def __init__(
        self, config: RunConfig, prompts: PromptSet, stream: Mixture, first_step: int
    ) -> None:
        self._config, self._stream, self._first_step = config, stream, first_step
        self._prompt_ids = {p.id: p.token_ids for p in prompts.train}

    def build(self, step: int, groups: GroupQueue, versions_needed_from: int) -> BuiltBatch | None:
        """The batch of a step, None until its groups (and those of its phase) are complete.

        Raises:
            RunError: a token is older than the schedule allows, or refilling comes to no end.
        """
        c, s = self._config, self._config.schedule
        ready = groups.next_groups()
        if ready is None or groups.next_groups(s.phase_steps(step)) is None:
            self._check_refill(step, groups)
            return None
        built = build_batch(
            step,
            ready,
            self._prompt_ids,
            c.algorithm,
            probe=PROBE_SEQUENCES if self._is_probed(step) else 0,
            save=step % c.checkpoint.every_steps == 0 and step > self._first_step,
            versions_needed_from=versions_needed_from,
        )
        lag = built.metrics["lag_max"]
        if lag > s.max_lag_steps:
            raise RunError(
                f"step {step}: a token is {lag} steps old, schedule.max_lag_steps is"
                f" {s.max_lag_steps}"
            )
        groups.take(step, ready)
        stream, found = self._stream, built.metrics
        found |= {"prompts_excluded": stream.excluded, "epoch": stream.epoch}
        if c.algorithm.refill:
            found["prompts_refilled"] = len(ready) - s.prompts_per_step
        if len(stream.tasks) > 1:
            found["tasks"] = {
                task: {
                    **measured,
                    "prompts_excluded": stream.excluded_of(task),
                    "epoch": stream.epoch_of(task),
                }
                for task, measured in by_task(stream.tasks, ready, built.kept).items()
            }
        return built

    def _is_probed(self, step: int) -> bool:
        c = self._config
        # Engines score given tokens from the plain logits, and with experts of their own.
        comparable = c.generation.temperature == 1.0 and c.algorithm.routing_replay != "replay"
        return comparable and step % c.metrics.logprob_check_every_steps == 0

    def _check_refill(self, step: int, groups: GroupQueue) -> None:
        a, s = self._config.algorithm, self._config.schedule
        drawn = groups.complete_ahead()
        if drawn > a.refill_max_ratio * s.prompts_per_step * s.phase_steps(step):
            raise RunError(
                f"step {step}: {drawn} prompts were drawn, and the completions of nearly all have"
                f" one reward; that is more than algorithm.refill_max_ratio ="
                f" {a.refill_max_ratio:g} times schedule.prompts_per_step = {s.prompts_per_step}:"
                " the prompts are too easy or too hard for the policy; take others, or set"
                " algorithm.refill false"
            )
