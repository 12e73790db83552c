"""Metrics of a step's rollouts, over all completions of its groups and for each task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from megatron_rl.messages import Sample
from megatron_rl.orchestrator.groups import Group

LONG_COMPLETION_TOKENS = 16


def rollout_metrics(step: int, groups: list[Group], kept: list[Group]) -> dict[str, Any]:
    """Return the rollout part of a step's row.

    Args:
        step: trainer step.
        groups: all groups of the step.
        kept: those that are trained.
    """
    samples = [s for g in groups for s in g.ordered]
    lags: Counter[int] = Counter()
    for span in (span for s in samples for span in s.spans if span.end > span.start):
        lags[step - span.version] += span.end - span.start
    long = [s for s in samples if len(s.token_ids) > LONG_COMPLETION_TOKENS]
    return {
        **task_metrics(groups, kept),
        "completions_interrupted": sum(s.forced[1] > s.forced[0] for s in samples),
        "tokens": sum(len(s.token_ids) for s in samples),
        "completion_tokens_max": max(len(s.token_ids) for s in samples),
        "lag_mean": sum(lag * n for lag, n in lags.items()) / max(lags.total(), 1),
        "lag_max": max(lags, default=0),
        "lag_histogram": {str(lag): n for lag, n in sorted(lags.items())},
        "multi_version_fraction": _multi_version_fraction(samples),
        "multi_version_fraction_long": _multi_version_fraction(long),
        "completions_long": len(long),
        "prompt_ids": [g.prompt_id for g in groups],
    }


def task_metrics(groups: list[Group], kept: list[Group]) -> dict[str, Any]:
    """Return the metrics that exist for a step and for each of its tasks.

    A mean over nothing is left out.
    """
    samples = [s for g in groups for s in g.ordered]
    rewards = [r for g in groups for s in g.ordered if (r := g.reward(s)) is not None]
    verdicts = Counter(v.outcome.value for g in groups for v in g.verdicts.values())
    means: dict[str, list[float]] = {
        "reward_mean": rewards,
        "train_pass_rate": [p for g in groups if (p := g.pass_rate) is not None],
        "completion_tokens_mean": [len(s.token_ids) for s in samples],
    }
    return {
        **{name: float(np.mean(values)) for name, values in means.items() if values},
        "prompts_trained": len(kept),
        "prompts_dropped_zero_variance": len(groups) - len(kept),
        "completions": len(samples),
        "completions_without_reward": len(samples) - len(rewards),
        "completions_truncated": sum(s.finish_reason == "length" for s in samples),
        "verdicts": dict(sorted(verdicts.items())),
    }


def by_task(
    tasks: Iterable[str], groups: list[Group], kept: list[Group]
) -> dict[str, dict[str, Any]]:
    """Return `task_metrics` of each task; a task without a prompt in the step has zero counts."""
    return {
        task: task_metrics(
            [g for g in groups if g.task == task], [g for g in kept if g.task == task]
        )
        for task in tasks
    }


def _multi_version_fraction(samples: list[Sample]) -> float:
    multi = sum(len({span.version for span in s.spans}) > 1 for s in samples)
    return multi / len(samples) if samples else 0.0
