"""Evaluations beside training: engines that are pinned to a version, and the verdicts to come."""

from __future__ import annotations

import time
from typing import Any

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.data import PromptSet
from megatron_rl.orchestrator.evaluation import EvaluationRun, evaluation_steps, steps_left
from megatron_rl.orchestrator.generators import Engine
from megatron_rl.orchestrator.meter import Meter
from megatron_rl.rewards import Outcome


class Evaluations:
    """The evaluations of a run: which are still to be made, and those under way.

    Args:
        config: evaluation, generation and timeouts.
        prompts: held-out prompts.
        meter: takes the rows.
        first_step: steps trained before this start of the run.
    """

    def __init__(
        self, config: RunConfig, prompts: PromptSet, meter: Meter, first_step: int
    ) -> None:
        self._config, self._prompts, self._meter = config, prompts, meter
        wanted = evaluation_steps(config.evaluation, config.schedule.steps)
        self.steps = steps_left(wanted, meter.evaluated_steps, first_step)
        """Steps still to evaluate at; engines skip none of these versions."""
        self._running: dict[int, EvaluationRun] = {}

    @property
    def running(self) -> list[int]:
        """Steps whose evaluation is not complete."""
        return list(self._running)

    def published(self, version: int) -> None:
        """A version is there: its evaluation begins when an engine holds it."""
        if version in self.steps:
            self._running[version] = EvaluationRun(
                version,
                [p.task for p in self._prompts.heldout],
                self._config.evaluation.samples_per_prompt,
                self._meter.compute(),
            )

    def start(self, engine: Engine, names: list[str], step: int) -> list[m.Generate]:
        """Pin the engine to this version; its share of the held-out prompts."""
        if step not in self._running:
            return []
        g = self._config.generation
        share = self._prompts.heldout[names.index(engine.name) :: len(names)]
        n = self._config.evaluation.samples_per_prompt
        engine.pinned, engine.evaluations_left = True, len(share) * n
        engine.in_flight += len(share) * n
        run = self._running[step]
        run.started = run.started or time.monotonic()
        self._meter.evaluation_started(engine.name)
        if not share:
            self._unpin(engine)
        return [
            m.Generate(
                group=prompt.id,
                prompt_id=prompt.id,
                prompt=prompt.token_ids,
                thinking_budgets=[g.thinking_budget_tokens[1]] * n,
                answer_budget=g.answer_budget_tokens,
                temperature=g.temperature,
                evaluation=step,
            )
            for prompt in share
        ]

    def arrived(self, engine: Engine, sample: m.Sample) -> None:
        """A completion came; the engine is free for the next version after its last one."""
        self._running[sample.evaluation].add(sample.prompt_id, sample)
        engine.evaluations_left -= 1
        if engine.evaluations_left == 0:
            self._unpin(engine)

    def judged(self, sample: m.Sample, outcome: Outcome) -> None:
        """A completion was verified; the row is written after the last one."""
        run = self._running[sample.evaluation]
        run.judged(sample.prompt_id, sample.index, outcome)
        if run.complete:
            del self._running[run.step]
            self.steps.discard(run.step)
            self._meter.evaluation(self._row(run))

    def _row(self, run: EvaluationRun) -> dict[str, Any]:
        now = time.monotonic()
        return run.row(now - (run.started or now))

    def _unpin(self, engine: Engine) -> None:
        engine.pinned = False
        self._meter.evaluation_ended(engine.name)
