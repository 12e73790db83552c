"""From complete groups to the trainer's batch: filters, advantages, loss weights, metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.algorithm.advantages import advantages
from megatron_rl.algorithm.aggregation import token_weights
from megatron_rl.config import Algorithm
from megatron_rl.messages import Batch, Sample
from megatron_rl.orchestrator.groups import Group

LONG_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """A step's batch, the metrics of its rollouts, and the completions that are probed."""

    batch: Batch
    metrics: dict[str, Any]
    probe: list[tuple[list[int], Sample]]
    """(prompt ids, completion) of each sequence of `batch.probe`."""


def build_batch(
    step: int,
    groups: list[Group],
    prompts: dict[int, list[int]],
    algorithm: Algorithm,
    *,
    probe: int = 0,
    **flags: Any,
) -> BuiltBatch:
    """The batch of a step.

    A group is kept if its usable completions differ in reward (zero-variance filter); dropped
    groups are not refilled, and the prompt mean is over the kept ones. Forced tokens and truncated
    completions have loss weight 0.

    Args:
        step: trainer step; weights of version `step` train it.
        groups: complete groups, in dispatch order.
        prompts: token ids of each prompt id.
        algorithm: filters, normalization and aggregation.
        probe: sequences whose trainer log-probs are wanted.
        flags: further fields of `Batch`.
    """
    trained = [(g, g.usable) for g in groups if not _dropped(g, algorithm)]
    rewards = [np.array([g.reward(s) for s in samples]) for g, samples in trained]
    normalized = advantages(rewards, algorithm.advantage_normalization)
    counts = [np.array([_sampled(s) for s in samples], dtype=np.int64) for _, samples in trained]
    weights = token_weights(counts, algorithm.aggregation)

    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("token_ids", "advantages", "logprobs", "weights", "versions")
    }
    bounds, prompt_lengths = [0], []
    for (group, samples), group_advantages, group_weights in zip(
        trained, normalized, weights, strict=True
    ):
        prompt = prompts[group.prompt_id]
        for sample, advantage, weight in zip(samples, group_advantages, group_weights, strict=True):
            p, n = len(prompt), len(sample.token_ids)
            mask = _sampled_mask(sample)
            columns["token_ids"].append(np.array([*prompt, *sample.token_ids], dtype="<i4"))
            columns["advantages"].append(_padded(p, np.full(n, advantage), 0.0))
            columns["logprobs"].append(_padded(p, np.array(sample.logprobs), 0.0))
            columns["weights"].append(_padded(p, np.where(mask, weight, 0.0), 0.0))
            versions = np.where(mask, token_versions(sample), -1)
            columns["versions"].append(_padded(p, versions, -1).astype("<i4"))
            bounds.append(bounds[-1] + p + n)
            prompt_lengths.append(p)

    def joined(name: str, dtype: str) -> bytes:
        parts = columns[name]
        return np.concatenate(parts).astype(dtype).tobytes() if parts else b""

    batch = Batch(
        step=step,
        bounds=np.array(bounds, dtype="<i4").tobytes(),
        prompt_lengths=np.array(prompt_lengths, dtype="<i4").tobytes(),
        token_ids=joined("token_ids", "<i4"),
        advantages=joined("advantages", "<f4"),
        generator_logprobs=joined("logprobs", "<f4"),
        loss_weights=joined("weights", "<f4"),
        versions=joined("versions", "<i4"),
        probe=list(range(min(probe, len(prompt_lengths)))),
        **flags,
    )
    flat = [(prompts[g.prompt_id], s) for g, samples in trained for s in samples]
    return BuiltBatch(batch, rollout_metrics(step, groups, len(trained)), flat[: len(batch.probe)])


def rollout_metrics(step: int, groups: list[Group], kept: int) -> dict[str, Any]:
    """Metrics of a step's rollouts, over all completions of its groups."""
    samples = [s for g in groups for s in g.ordered]
    verdicts = Counter(v.verdict.value for g in groups for v in g.verdicts.values())
    lags = Counter(
        step - span.version
        for s in samples
        for span in s.spans
        for _ in range(span.start, span.end)
    )
    lag_tokens = sum(lags.values())
    long = [s for s in samples if len(s.token_ids) > LONG_COMPLETION_TOKENS]
    return {
        "reward_mean": float(np.mean([g.reward(s) for g in groups for s in g.ordered])),
        "train_pass_rate": float(np.mean([g.pass_rate for g in groups])),
        "prompts_trained": kept,
        "prompts_dropped_zero_variance": len(groups) - kept,
        "completions": len(samples),
        "completions_truncated": sum(s.finish_reason == "length" for s in samples),
        "completions_interrupted": sum(s.forced[1] > s.forced[0] for s in samples),
        "tokens": sum(len(s.token_ids) for s in samples),
        "completion_tokens_mean": float(np.mean([len(s.token_ids) for s in samples])),
        "completion_tokens_max": max(len(s.token_ids) for s in samples),
        "verdicts": dict(sorted(verdicts.items())),
        "lag_mean": sum(lag * n for lag, n in lags.items()) / max(lag_tokens, 1),
        "lag_max": max(lags, default=0),
        "lag_histogram": {str(lag): n for lag, n in sorted(lags.items())},
        "multi_version_fraction": _share_multi(samples),
        "multi_version_fraction_long": _share_multi(long),
        "completions_long": len(long),
        "prompt_ids": [g.prompt_id for g in groups],
    }


def token_versions(sample: Sample) -> np.ndarray:
    """Version that made each token of a completion, int32 [tokens].

    Raises:
        ValueError: the spans leave a gap or don't end at the completion's end.
    """
    versions = np.concatenate(
        [np.full(span.end - span.start, span.version) for span in sample.spans] or [np.empty(0)]
    ).astype(np.int32)
    starts = [span.start for span in sample.spans]
    ends = [0, *(span.end for span in sample.spans)]
    if starts != ends[:-1] or ends[-1] != len(sample.token_ids):
        raise ValueError(
            f"completion {sample.index} of group {sample.group}: version spans {sample.spans} do"
            f" not cover its {len(sample.token_ids)} tokens"
        )
    return versions


def _dropped(group: Group, algorithm: Algorithm) -> bool:
    usable = group.usable
    if len(usable) < 2:
        return True
    return algorithm.zero_variance_filter and len({group.reward(s) for s in usable}) == 1


def _share_multi(samples: list[Sample]) -> float:
    if not samples:
        return 0.0
    return sum(len({span.version for span in s.spans}) > 1 for s in samples) / len(samples)


def _sampled_mask(sample: Sample) -> np.ndarray:
    mask = np.ones(len(sample.token_ids), dtype=bool)
    mask[sample.forced[0] : sample.forced[1]] = False
    return mask


def _sampled(sample: Sample) -> int:
    return int(_sampled_mask(sample).sum())


def _padded(prompt_tokens: int, values: np.ndarray, fill: float) -> np.ndarray:
    return np.concatenate([np.full(prompt_tokens, fill), values])
