"""The prompt stream of a run, and the batch of each step once its groups are complete."""

import math
import time
from typing import Any

from megatron_rl import messages as m
from megatron_rl.algorithm.advantages import thinking_budgets
from megatron_rl.algorithm.curriculum import Curriculum
from megatron_rl.config import RunConfig
from megatron_rl.data import Prompt, PromptSet
from megatron_rl.data.mixture import Mixture, shares
from megatron_rl.metrics.alarms import diagnosis
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.batching import BuiltBatch, build_batch, by_task, task_metrics
from megatron_rl.orchestrator.groups import Group, GroupQueue
from megatron_rl.orchestrator.recording import Recorder

PROBE_SEQUENCES = 4  # of a step, whose log-probs are compared between trainer and generator


def row_of(config: RunConfig, prompt: Prompt) -> dict[str, Any]:
    """Return what several turns need of a prompt; nothing for a single turn, as of a set's."""
    task = config.tasks.get(prompt.task)
    return {} if task is None or task.is_single_turn else prompt.row


class StepBuilder:
    """Draws prompts, and builds the batch of each step from the queue of groups."""

    def __init__(
        self, config: RunConfig, prompts: PromptSet, recorder: Recorder | None = None
    ) -> None:
        self._config, self._recorder, a = config, recorder or Recorder(), config.algorithm
        self._prompts = prompts.train
        self._prompt_ids = {p.id: p.token_ids for p in prompts.train}
        weights = {name: task.weight for name, task in config.tasks.items()}
        part = shares(weights)
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
        # The prompts of all tasks by weight, with a curriculum for each task.
        self.stream = Mixture(streams, prompts.sizes, weights, config.seed)
        self.first_step = 0  # steps trained before this start of the run
        self._saved_at = time.monotonic()

    def request(self, group: Group, indices: list[int], oldest: int) -> m.Generate:
        """Return the request for completions of a group.

        Beginnings that a lost generator had told are continued; those by weights before version
        `oldest` are made again.
        """
        g, seed = self._config.generation, self._config.seed
        budgets = thinking_budgets(seed, group.index, group.size, g.thinking_budget_tokens)
        for i in indices:
            if i in group.begun and group.begun[i].spans[0].version < oldest:
                del group.begun[i]
        return m.Generate(
            group=group.index, prompt_id=group.prompt_id, indices=indices,
            prompt=self._prompt_ids[group.prompt_id], temperature=g.temperature,
            limits=[m.TurnLimits(budgets[i], g.answer_budget_tokens) for i in indices],
            task=group.task, row=row_of(self._config, self._prompts[group.prompt_id]),
            begun={i: group.begun[i] for i in indices if i in group.begun},
        )  # fmt: skip

    def build(self, step: int, groups: GroupQueue) -> BuiltBatch | None:
        """Build the batch of a step; None until its groups (and those of its phase) are complete.

        Raises:
            RunError: a token is older than the schedule allows, or refilling finds no usable group.
        """
        c, s = self._config, self._config.schedule
        ready = groups.next_groups()
        if ready is None or groups.next_groups(s.phase_steps(step)) is None:
            self._check_refill(step, groups)
            return None
        if self._recorder.behind():
            return None
        groups.take(step, ready)
        everything, ready = ready, [g for g in ready if not g.failed]
        failed = len(everything) - len(ready)
        # Generators score tokens at temperature 1 and with their own routed experts.
        comparable = c.generation.temperature == 1.0 and c.algorithm.routing_replay != "replay"
        probed = comparable and step % c.metrics.logprob_check_every_steps == 0
        probe = PROBE_SEQUENCES if probed else 0
        now = time.monotonic()
        save = step > self.first_step and c.checkpoint.is_due(step, now - self._saved_at)
        built = build_batch(step, ready, self._prompt_ids, c.algorithm, probe=probe, save=save)
        stream, metrics = self.stream, built.metrics
        lag, limit = metrics["lag_max"], s.max_lag_steps
        if lag > limit:
            raise RunError(
                f"step {step}: a token is {lag} steps old, schedule.max_lag_steps is {limit}"
            )
        self._saved_at = now if save and built.teaches else self._saved_at
        metrics |= {"prompts_excluded": stream.excluded, "epoch": stream.epoch}
        if failed:
            metrics["prompts_failed"] = failed
        if c.algorithm.refill:
            metrics["prompts_refilled"] = len(ready) - s.prompts_per_step
        if len(stream.curricula) > 1:
            tasks = metrics["tasks"] = by_task(stream.curricula, ready, built.kept)
            for task, curriculum in stream.curricula.items():
                tasks[task] |= {"prompts_excluded": curriculum.excluded, "epoch": curriculum.epoch}
        self._recorder.batch(step, everything, built, self._prompts)
        return built

    def record(self, groups: list[Group]) -> None:
        """Tell the curriculum the pass rates of groups that are done."""
        for group in groups:
            if (pass_rate := group.pass_rate) is not None:
                self.stream.record(group.prompt_id, pass_rate)

    def _check_refill(self, step: int, groups: GroupQueue) -> None:
        a, s = self._config.algorithm, self._config.schedule
        drawn = groups.complete_ahead()
        if drawn > a.refill_max_ratio * s.prompts_per_step * s.phase_steps(step):
            complete = [g for g in groups.waiting if g.complete and not g.failed]
            raise RunError(
                f"step {step}: {drawn} prompts were drawn, and nearly all groups have equal"
                " rewards; that is more than algorithm.refill_max_ratio ="
                f" {a.refill_max_ratio:g} times schedule.prompts_per_step = {s.prompts_per_step}:"
                f" {diagnosis(task_metrics(complete, []))}; or set algorithm.refill false"
            )
