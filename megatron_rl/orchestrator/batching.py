"""The trainer's batch from complete groups: filters, advantages, loss weights; its metrics."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.algorithm.advantages import advantages as group_advantages
from megatron_rl.algorithm.aggregation import token_weights
from megatron_rl.algorithm.length_control import length_penalty
from megatron_rl.config import Algorithm
from megatron_rl.messages import Batch, Sample, ScoreRequest
from megatron_rl.orchestrator.groups import Group

LONG_COMPLETION_TOKENS = 16
ZERO_ADVANTAGE = 1e-6
"""Larger ones are no rounding of equal rewards."""


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """A step's batch and the metrics of its rollouts."""

    batch: Batch
    kept: list[Group]
    """Groups that are trained."""
    metrics: dict[str, Any]
    probe: ScoreRequest
    """Request for the generator's log-probs of the sequences of `batch.probe`."""
    teaches: bool
    """False if the gradient is zero: a step would move the weights by Adam's momentum alone."""


@dataclass(frozen=True, slots=True)
class _TrainedSample:
    prompt: list[int]
    sample: Sample
    advantage: float
    loss_weight: float
    """Of each sampled token."""


def build_batch(
    step: int,
    groups: list[Group],
    prompts: dict[int, list[int]],
    algorithm: Algorithm,
    *,
    probe: int = 0,
    **flags: Any,
) -> BuiltBatch:
    """Build the batch of a step.

    Weights of version `step` train it. The groups are complete and in dispatch order; a group is
    kept if its completions differ in verified reward (zero-variance filter), and the mean over
    prompts is over kept groups. Forced tokens have loss weight 0. Completions without a reward are
    in neither batch nor baseline; `algorithm.truncated` decides for truncated completions. The
    trainer returns the log-probs of `probe` sequences; `flags` are other fields of `Batch`.
    """
    kept = [g for g in groups if not is_dropped(g, algorithm)]
    trained = _trained_samples(groups, kept, prompts, algorithm)

    def column(values: Callable[[_TrainedSample], Any], fill: float, dtype: str) -> bytes:
        """Return a value for each completion token, and `fill` for each prompt token."""
        parts = [np.empty(0)]
        for t in trained:
            parts += [np.full(len(t.prompt), fill), np.asarray(values(t))]
        return np.concatenate(parts).astype(dtype).tobytes()

    lengths = [len(t.prompt) + len(t.sample.token_ids) for t in trained]
    batch = Batch(
        step=step,
        bounds=np.cumsum([0, *lengths]).astype("<i4").tobytes(),
        prompt_lengths=_int32(len(t.prompt) for t in trained),
        prompt_ids=_int32(t.sample.prompt_id for t in trained),
        completion_indices=_int32(t.sample.index for t in trained),
        token_ids=_int32(id_ for t in trained for id_ in (*t.prompt, *t.sample.token_ids)),
        advantages=column(lambda t: np.full(len(t.sample.token_ids), t.advantage), 0.0, "<f4"),
        generator_logprobs=column(lambda t: t.sample.logprobs, 0.0, "<f4"),
        loss_weights=column(lambda t: t.loss_weight * _sampled_mask(t.sample), 0.0, "<f4"),
        versions=column(
            lambda t: np.where(_sampled_mask(t.sample), token_versions(t.sample), -1), -1, "<i4"
        ),
        routes=b"".join(t.sample.routes for t in trained),
        probe=list(range(min(probe, len(trained)))),
        **flags,
    )
    metrics = rollout_metrics(step, groups, kept)
    metrics["prompts_differing"] = sum(_rewards_differ(g, algorithm) for g in groups)
    if algorithm.length_penalty != "none":
        penalties = [_penalties(g, baseline_samples(g, algorithm), algorithm) for g in kept]
        metrics["length_penalty_mean"] = float(np.concatenate(penalties).mean()) if kept else 0.0
    request = ScoreRequest(
        step=step,
        prompts=[t.prompt for t in trained[:probe]],
        completions=[t.sample.token_ids for t in trained[:probe]],
    )
    teaches = any(
        t.loss_weight and (abs(t.advantage) > ZERO_ADVANTAGE or algorithm.has_other_terms)
        for t in trained
    )
    return BuiltBatch(batch, kept, metrics, request, teaches)


def _int32(values: Iterable[int]) -> bytes:
    return np.fromiter(values, dtype="<i4").tobytes()


def _trained_samples(
    groups: list[Group], kept: list[Group], prompts: dict[int, list[int]], algorithm: Algorithm
) -> list[_TrainedSample]:
    def rewards(group: Group) -> np.ndarray:
        samples = baseline_samples(group, algorithm)
        verified = np.array([group.reward(s) for s in samples], dtype=np.float64)
        return verified + _penalties(group, samples, algorithm)

    dropped = [g for g in groups if is_dropped(g, algorithm) and baseline_samples(g, algorithm)]
    advantages = group_advantages(
        [rewards(g) for g in kept],
        algorithm.advantage_normalization,
        baseline=algorithm.advantage_baseline,
        others=[rewards(g) for g in dropped] if algorithm.advantage_std_over == "all" else [],
    )
    pairs = [
        [
            (sample, float(advantage))
            for sample, advantage in zip(baseline_samples(g, algorithm), values, strict=True)
            if algorithm.truncated == "train" or sample.finish_reason != "length"
        ]
        for g, values in zip(kept, advantages, strict=True)
    ]
    counts = [np.array([_sampled_mask(s).sum() for s, _ in p], dtype=np.int64) for p in pairs]
    weights = token_weights(counts, algorithm.aggregation, algorithm.constant_length_tokens)
    return [
        _TrainedSample(prompts[group.prompt_id], sample, advantage, float(weight))
        for group, group_pairs, group_weights in zip(kept, pairs, weights, strict=True)
        for (sample, advantage), weight in zip(group_pairs, group_weights, strict=True)
    ]


def baseline_samples(group: Group, algorithm: Algorithm) -> list[Sample]:
    """Return the completions whose rewards form the group's baseline."""
    return group.usable if algorithm.truncated == "drop" else group.rewarded


def is_dropped(group: Group, algorithm: Algorithm) -> bool:
    """Return True if a complete group has no gradient and is left out of the batch."""
    samples = baseline_samples(group, algorithm)
    if len(samples) < 2 or not (group.usable or algorithm.truncated == "train"):
        return True
    return algorithm.zero_variance_filter and not _rewards_differ(group, algorithm)


def _rewards_differ(group: Group, algorithm: Algorithm) -> bool:
    return len({group.reward(s) for s in baseline_samples(group, algorithm)}) > 1


def _penalties(group: Group, samples: list[Sample], algorithm: Algorithm) -> np.ndarray:
    if algorithm.length_penalty == "none":
        return np.zeros(len(samples))
    longest, cache = algorithm.length_max_tokens, algorithm.length_cache_tokens
    assert longest is not None and cache is not None
    penalties = length_penalty(np.array([len(s.token_ids) for s in samples]), longest, cache)
    if algorithm.length_penalty == "all":
        return penalties
    return np.where([group.verdicts[s.index].passed for s in samples], penalties, 0.0)


def token_versions(sample: Sample) -> np.ndarray:
    """Return the weight version of each token of a completion, int32 [tokens].

    Raises:
        ValueError: the spans leave a gap or do not end at the completion's end.
    """
    starts = [span.start for span in sample.spans]
    ends = [0, *(span.end for span in sample.spans)]
    if starts != ends[:-1] or ends[-1] != len(sample.token_ids):
        raise ValueError(
            f"completion {sample.index} of group {sample.group}: version spans {sample.spans} do"
            f" not cover its {len(sample.token_ids)} tokens"
        )
    versions = np.array([span.version for span in sample.spans], dtype=np.int32)
    return np.repeat(versions, np.diff(ends))


def _sampled_mask(sample: Sample) -> np.ndarray:
    """Return True for sampled tokens, False for forced ones, [tokens]."""
    mask = np.ones(len(sample.token_ids), dtype=bool)
    mask[slice(*sample.forced)] = False
    return mask


def rollout_metrics(step: int, groups: list[Group], kept: list[Group]) -> dict[str, Any]:
    """Return the rollout part of a step's row; `kept` are the groups that are trained."""
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
    failures = Counter(v.reason for g in groups for v in g.verdicts.values() if not v.passed)
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
        **({"frequent_failure": failures.most_common(1)[0][0][:200]} if failures else {}),
    }


def by_task(tasks: Iterable[str], groups: list[Group], kept: list[Group]) -> dict[str, Any]:
    """Return `task_metrics` of each task; a task without a prompt in the step has zero counts."""
    parts = {t: [[g for g in part if g.task == t] for part in (groups, kept)] for t in tasks}
    return {task: task_metrics(*part) for task, part in parts.items()}


def _multi_version_fraction(samples: list[Sample]) -> float:
    multi = sum(len({span.version for span in s.spans}) > 1 for s in samples)
    return multi / len(samples) if samples else 0.0
