"""Evaluations of a run: their steps, their requests to generators, and their rows."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from megatron_rl import messages as m
from megatron_rl.config import Evaluation, RunConfig
from megatron_rl.data import Prompt
from megatron_rl.orchestrator.child_process import EvaluateOnly
from megatron_rl.orchestrator.generators import GeneratorState
from megatron_rl.orchestrator.run_metrics import RunMetrics
from megatron_rl.rewards import Verdict


def evaluation_steps(evaluation: Evaluation, steps: int) -> list[int]:
    """Return the steps to evaluate at: 0, then evenly spaced in log compute up to the last step.

    Compute is proportional to steps here. With `every_steps` they are evenly spaced in steps.
    """
    if evaluation.every_steps is not None:
        return sorted({*range(0, steps, evaluation.every_steps), steps})
    spaced = np.geomspace(evaluation.first_step, steps, evaluation.points)
    return sorted({0, *(round(float(s)) for s in spaced), steps})


def steps_left(planned: Sequence[int], evaluated: set[int], first_step: int) -> set[int]:
    """Return the steps to evaluate at in a run that starts at `first_step`.

    An evaluation that was running when the run ended cannot be completed: its weights are gone. The
    curve gets a point at the first step instead.

    Example: of 0, 8, 20 with 0 evaluated, a run that starts at step 10 evaluates at 10 and 20.
    """
    missing = set(planned) - evaluated
    left = {s for s in missing if s >= first_step}
    return left if left == missing else left | {first_step}


EvaluatedSample = tuple[m.Sample, Verdict]
"""A completion with its verdict, as JSON a line of `EvaluateOnly.samples_file`."""


@dataclass(slots=True)
class EvaluationRun:
    """A running evaluation: mean@n over the held-out prompts at one weight version."""

    step: int
    tasks: Sequence[str]
    """Task of each held-out prompt."""
    samples_per_prompt: int
    compute: dict[str, float]
    """Compute spent up to this version."""
    samples: dict[tuple[int, int], EvaluatedSample] = field(default_factory=dict)
    """(prompt, index) -> completion and verdict."""
    started: float | None = None

    def check_versions(self, sample: m.Sample) -> None:
        """Raise ValueError if another weight version sampled a part of a completion."""
        versions = {span.version for span in sample.spans}
        if versions - {self.step}:
            raise ValueError(
                f"evaluation at step {self.step}: prompt {sample.prompt_id} was answered by weight"
                f" versions {sorted(versions)}; the generators must hold version {self.step} while"
                " it runs"
            )

    def add(self, sample: m.Sample, verdict: Verdict) -> None:
        """Add a verified completion."""
        self.samples[sample.prompt_id, sample.index] = sample, verdict

    @property
    def complete(self) -> bool:
        """True once every completion is verified."""
        return len(self.samples) == len(self.tasks) * self.samples_per_prompt

    def row(self, seconds: float) -> dict[str, Any]:
        """Return the row of metrics.jsonl: pass rates with standard errors, and compute."""
        rates = self._pass_rates(range(len(self.tasks)))
        row = {"step": self.step, **self.compute, **rates, "eval_seconds": seconds}
        if len(names := dict.fromkeys(self.tasks)) > 1:
            row["tasks"] = {
                name: self._pass_rates([p for p, task in enumerate(self.tasks) if task == name])
                for name in names
            }
        return row

    def _pass_rates(self, prompts: Sequence[int]) -> dict[str, Any]:
        n = self.samples_per_prompt
        samples = [self.samples[p, i] for p in prompts for i in range(n)]
        table = np.array([v.passed for _, v in samples], dtype=float).reshape(-1, n)
        truncated = [s.finish_reason == "length" for s, _ in samples]
        return {
            "pass_rate": float(table.mean(axis=1).mean()),
            "pass_rate_stderr": sampling_stderr(table),
            "pass_at_n": float(table.max(axis=1).mean()),
            "num_prompts": len(prompts),
            "samples_per_prompt": n,
            "verdicts": dict(sorted(Counter(v.outcome.value for _, v in samples).items())),
            "eval_completion_tokens_mean": float(np.mean([len(s.token_ids) for s, _ in samples])),
            "eval_truncated_fraction": float(np.mean(truncated)),
        }


def sampling_stderr(table: np.ndarray) -> float:
    """Return the standard error of mean@n from sampling, for a fixed set of prompts.

    All evaluations have the same held-out prompts, so the scatter between points of one curve comes
    from the completions: `sqrt(sum_p var_p / n) / P`, [P prompts, n samples].
    """
    prompts, samples = table.shape
    if samples < 2:
        return float(table.mean(axis=1).std(ddof=1) / np.sqrt(prompts)) if prompts > 1 else 0.0
    variance = table.var(axis=1, ddof=1) / samples
    # Without any scatter the error is still not zero: assume half a completion.
    return float(max(np.sqrt(variance.sum()) / prompts, 0.5 / (prompts * samples)))


class Evaluations:
    """The evaluations of a run that starts at `first_step`: those to come and those in progress."""

    def __init__(
        self,
        config: RunConfig,
        heldout: list[Prompt],
        metrics: RunMetrics,
        first_step: int,
        only: EvaluateOnly | None = None,
    ) -> None:
        self._config, self._heldout, self._metrics, self._only = config, heldout, metrics, only
        planned = [0] if only else evaluation_steps(config.evaluation, config.schedule.steps)
        self.steps = steps_left(planned, metrics.evaluated_steps, first_step)
        """Steps to evaluate at; generators skip none of these versions."""
        self.running: dict[int, EvaluationRun] = {}
        """Evaluations by step until they are complete."""

    def reach(self, version: int) -> None:
        """Open the evaluation of a version, if one is planned, when its steps are trained."""
        if version in self.steps:
            tasks, n = [p.task for p in self._heldout], self._config.evaluation.samples_per_prompt
            self.running[version] = EvaluationRun(version, tasks, n, self._metrics.compute())

    def start(self, generator: GeneratorState) -> list[m.Generate]:
        """Hold a generator at its version and return the requests for its share of the prompts."""
        step = generator.version
        if step not in self.running:
            return []
        g, n = self._config.generation, self._config.evaluation.samples_per_prompt
        number = int(generator.name.rpartition("-")[2])
        share = self._heldout[number :: self._config.roles.engines]
        if share:
            generator.evaluations_left = len(share) * n
            generator.in_flight += len(share) * n
            run = self.running[step]
            run.started = run.started or time.monotonic()
            self._metrics.sink.note("evaluating")
        return [
            m.Generate(
                group=prompt.id,
                prompt_id=prompt.id,
                prompt=prompt.token_ids,
                thinking_budgets=[g.thinking_budget_tokens[1]] * n,
                answer_budget=g.answer_budget_tokens,
                temperature=self._only.temperature if self._only else g.temperature,
                evaluation=step,
            )
            for prompt in share
        ]

    def arrived(self, generator: GeneratorState, sample: m.Sample) -> None:
        """Count a completion; the generator's last one frees it for the next version."""
        self.running[sample.evaluation].check_versions(sample)
        generator.evaluations_left -= 1
        self._metrics.evaluation_completion(len(sample.token_ids))

    def verified(self, sample: m.Sample, verdict: Verdict) -> None:
        """Add a verdict; the last one writes the row."""
        run = self.running[sample.evaluation]
        sample = msgspec.structs.replace(sample, logprobs=[], routes=b"")  # their bulk is unused
        run.add(sample, verdict)
        if self._only:
            with open(self._only.samples_file, "ab") as file:
                file.write(msgspec.json.encode((sample, verdict)) + b"\n")
        if run.complete:
            del self.running[run.step]
            self.steps.discard(run.step)
            now = time.monotonic()
            self._metrics.evaluation(run.row(now - (run.started or now)))
