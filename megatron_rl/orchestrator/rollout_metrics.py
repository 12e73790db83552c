"""Metrics of a step's rollouts, over all completions of its groups, and of each task's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from megatron_rl.messages import Sample
from megatron_rl.orchestrator.groups import Group

LONG_COMPLETION_TOKENS = 16


def rollout_metrics(step: int, groups: list[Group], kept: list[Group]) -> dict[str, Any]:
    """The row of a step, without what the trainer measures.

    Args:
        step: trainer step.
        groups: all groups of the step.
        kept: those that are trained.
    """
    samples = [s for g in groups for s in g.ordered]
    lags = Counter(
        step - span.version
        for s in samples
        for span in s.spans
        for _ in range(span.start, span.end)
    )
    lag_tokens = sum(lags.values())
    long = [s for s in samples if len(s.token_ids) > LONG_COMPLETION_TOKENS]
    return {
        **task_metrics(groups, kept),
        "completions_interrupted": sum(s.forced[1] > s.forced[0] for s in samples),
        "tokens": sum(len(s.token_ids) for s in samples),
        "completion_tokens_max": max(len(s.token_ids) for s in samples),
        "lag_mean": sum(lag * n for lag, n in lags.items()) / max(lag_tokens, 1),
        "lag_max": max(lags, default=0),
        "lag_histogram": {str(lag): n for lag, n in sorted(lags.items())},
        "multi_version_fraction": _share_multi(samples),
        "multi_version_fraction_long": _share_multi(long),
        "completions_long": len(long),
        "prompt_ids": [g.prompt_id for g in groups],
    }


def task_metrics(groups: list[Group], kept: list[Group]) -> dict[str, Any]:
    """What is measured of a step as a whole and of each of its tasks.

    Means are over what has a value: without any, the name is left out.
    """
    samples = [s for g in groups for s in g.ordered]
    rewards = [r for g in groups for s in g.ordered if (r := g.reward(s)) is not None]
    passed = [p for g in groups if (p := g.pass_rate) is not None]
    verdicts = Counter(v.verdict.value for g in groups for v in g.verdicts.values())
    means: dict[str, list[float]] = {
        "reward_mean": rewards,
        "train_pass_rate": passed,
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
    """`task_metrics` of each task; one that the step has no prompt of has zero counts."""
    return {
        task: task_metrics(
            [g for g in groups if g.task == task], [g for g in kept if g.task == task]
        )
        for task in tasks
    }


def _share_multi(samples: list[Sample]) -> float:
    if not samples:
        return 0.0
    return sum(len({span.version for span in s.spans}) > 1 for s in samples) / len(samples)
