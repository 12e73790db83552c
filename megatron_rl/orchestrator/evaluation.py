"""When to evaluate, and what an evaluation measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.config import Evaluation
from megatron_rl.messages import Sample


def evaluation_steps(evaluation: Evaluation, steps: int) -> list[int]:
    """Steps to evaluate at: 0, then evenly spaced in the logarithm of compute up to the last.

    Compute is proportional to steps here: every step trains the same number of completions.
    """
    spaced = np.geomspace(evaluation.first_step, steps, evaluation.points)
    return sorted({0, *(round(float(s)) for s in spaced), steps})


@dataclass(slots=True)
class EvaluationRun:
    """One evaluation under way: mean@n over the held-out prompts at one weight version."""

    step: int
    prompts: int
    samples_per_prompt: int
    compute: dict[str, float]
    """Compute spent up to this version."""
    passed: dict[tuple[int, int], bool] = field(default_factory=dict)
    tokens: int = 0
    truncated: int = 0
    started: float | None = None
    """When the first engine began."""

    def add(self, prompt: int, sample: Sample, passed: bool) -> None:
        """One verified completion.

        Raises:
            ValueError: another weight version made a part of it.
        """
        versions = {span.version for span in sample.spans}
        if versions - {self.step}:
            raise ValueError(
                f"evaluation at step {self.step}: prompt {prompt} was answered by weight versions"
                f" {sorted(versions)}; the generators must hold version {self.step} while it runs"
            )
        self.passed[prompt, sample.index] = passed
        self.tokens += len(sample.token_ids)
        self.truncated += sample.finish_reason == "length"

    @property
    def complete(self) -> bool:
        """Whether every completion was verified."""
        return len(self.passed) == self.prompts * self.samples_per_prompt

    def row(self, seconds: float) -> dict[str, Any]:
        """The row of metrics.jsonl: pass rate, its standard error over prompts, and compute."""
        table = np.zeros((self.prompts, self.samples_per_prompt))
        for (prompt, index), passed in self.passed.items():
            table[prompt, index] = passed
        per_prompt = table.mean(axis=1)
        return {
            "step": self.step,
            **self.compute,
            "pass_rate": float(per_prompt.mean()),
            "pass_rate_stderr": sampling_stderr(table),
            "pass_at_n": float(table.max(axis=1).mean()),
            "num_prompts": self.prompts,
            "samples_per_prompt": self.samples_per_prompt,
            "eval_completion_tokens_mean": self.tokens / table.size,
            "eval_truncated_fraction": self.truncated / table.size,
            "eval_seconds": seconds,
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
