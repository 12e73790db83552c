"""When to evaluate, and what an evaluation measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.config import Evaluation
from megatron_rl.messages import Sample
from megatron_rl.rewards import Outcome


def evaluation_steps(evaluation: Evaluation, steps: int) -> list[int]:
    """Steps to evaluate at: 0, then evenly spaced in the logarithm of compute up to the last.

    Compute is proportional to steps here: every step trains the same number of completions.
    With `every_steps` they are that far apart instead, and the last step is one of them.
    """
    if evaluation.every_steps is not None:
        return sorted({*range(0, steps, evaluation.every_steps), steps})
    spaced = np.geomspace(evaluation.first_step, steps, evaluation.points)
    return sorted({0, *(round(float(s)) for s in spaced), steps})


def steps_left(wanted: Sequence[int], evaluated: set[int], first_step: int) -> set[int]:
    """Steps still to evaluate at, in a run that starts at `first_step`.

    An evaluation that was under way when the run ended cannot be made up: the weights of its step
    are gone. The curve gets a point at the first step instead.

    Example: of 0, 8, 20 with 0 evaluated, a run that starts at step 10 evaluates at 10 and 20.
    """
    missing = set(wanted) - evaluated
    left = {s for s in missing if s >= first_step}
    return left if left == missing else left | {first_step}


@dataclass(slots=True)
class EvaluationRun:
    """One evaluation under way: mean@n over the held-out prompts at one weight version."""

    step: int
    tasks: Sequence[str]
    """Task of each held-out prompt."""
    samples_per_prompt: int
    compute: dict[str, float]
    """Compute spent up to this version."""
    lengths: dict[tuple[int, int], tuple[int, bool]] = field(default_factory=dict)
    """(prompt, index) -> (tokens of the completion, whether it was truncated)."""
    outcomes: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    """(prompt, index) -> what the verifier said."""
    started: float | None = None
    """When the first engine began."""

    def add(self, prompt: int, sample: Sample) -> None:
        """A completion arrived.

        Raises:
            ValueError: another weight version made a part of it.
        """
        versions = {span.version for span in sample.spans}
        if versions - {self.step}:
            raise ValueError(
                f"evaluation at step {self.step}: prompt {prompt} was answered by weight versions"
                f" {sorted(versions)}; the generators must hold version {self.step} while it runs"
            )
        truncated = sample.finish_reason == "length"
        self.lengths[prompt, sample.index] = (len(sample.token_ids), truncated)

    def judged(self, prompt: int, index: int, outcome: Outcome) -> None:
        """The verdict on a completion that arrived."""
        self.outcomes[prompt, index] = outcome

    @property
    def complete(self) -> bool:
        """Whether every completion was verified."""
        return len(self.outcomes) == len(self.tasks) * self.samples_per_prompt

    def row(self, seconds: float) -> dict[str, Any]:
        """The row of metrics.jsonl: pass rates with their standard errors, and compute."""
        names = list(dict.fromkeys(self.tasks))
        row = {
            "step": self.step,
            **self.compute,
            **self._measured(range(len(self.tasks))),
            "eval_seconds": seconds,
        }
        if len(names) > 1:
            row["tasks"] = {
                name: self._measured([p for p, task in enumerate(self.tasks) if task == name])
                for name in names
            }
        return row

    def _measured(self, prompts: Sequence[int]) -> dict[str, Any]:
        """Over some prompts; only a correct answer passes, whatever reward the others have."""
        n = self.samples_per_prompt
        outcomes = [[self.outcomes[p, i] for i in range(n)] for p in prompts]
        table = np.array(outcomes) == Outcome.CORRECT
        tokens, truncated = zip(
            *(self.lengths[p, i] for p in prompts for i in range(n)), strict=True
        )
        return {
            "pass_rate": float(table.mean(axis=1).mean()),
            "pass_rate_stderr": sampling_stderr(table.astype(float)),
            "pass_at_n": float(table.max(axis=1).mean()),
            "num_prompts": len(prompts),
            "samples_per_prompt": n,
            "verdicts": dict(sorted(Counter(o.value for row in outcomes for o in row).items())),
            "eval_completion_tokens_mean": float(np.mean(tokens)),
            "eval_truncated_fraction": float(np.mean(truncated)),
        }


def sampling_stderr(table: np.ndarray) -> float:
    """Standard error of mean@n from sampling, for a fixed set of prompts.

    The held-out prompts are the same at every evaluation, so the scatter between points of one
    curve comes from the completions: `sqrt(sum_p var_p / n) / P`, [P prompts, n samples].
    """
    prompts, samples = table.shape
    if samples < 2:
        return float(table.mean(axis=1).std(ddof=1) / np.sqrt(prompts)) if prompts > 1 else 0.0
    variance = table.var(axis=1, ddof=1) / samples
    # With no scatter at all the error is not zero: half a completion stands in for it.
    return float(max(np.sqrt(variance.sum()) / prompts, 0.5 / (prompts * samples)))
