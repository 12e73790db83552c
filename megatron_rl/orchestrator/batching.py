"""From complete groups to the trainer's batch: filters, advantages, loss weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.algorithm.advantages import AdvantageEstimator, GroupBaseline
from megatron_rl.algorithm.aggregation import token_weights
from megatron_rl.algorithm.rewards import length_penalty
from megatron_rl.config import Algorithm
from megatron_rl.messages import Batch, Sample
from megatron_rl.orchestrator.groups import Group
from megatron_rl.orchestrator.rollout_metrics import rollout_metrics


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """A step's batch, the metrics of its rollouts, and the completions that are probed."""

    batch: Batch
    kept: list[Group]
    """Groups that are trained."""
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

    A group is kept if its completions differ in verified reward (zero-variance filter); the prompt
    mean is over the kept ones. Forced tokens have loss weight 0. Completions whose verdict is no
    reward are left out of the batch and of the baseline; truncated ones are left out of both, of
    the batch alone, or of neither, as the algorithm says.

    Args:
        step: trainer step; weights of version `step` train it.
        groups: complete groups, in dispatch order.
        prompts: token ids of each prompt id.
        algorithm: filters, penalties, advantages and aggregation.
        probe: sequences whose trainer log-probs are wanted.
        flags: further fields of `Batch`.
    """
    kept = [g for g in groups if not is_dropped(g, algorithm)]
    rewards = [shaped_rewards(g, baseline_samples(g, algorithm), algorithm) for g in kept]
    others = [
        shaped_rewards(g, samples, algorithm)
        for g in groups
        if is_dropped(g, algorithm) and (samples := baseline_samples(g, algorithm))
    ]
    lengths = [
        np.array([len(s.token_ids) for s in baseline_samples(g, algorithm)], dtype=np.int64)
        for g in kept
    ]
    advantages = _estimator(algorithm).tokens(rewards, lengths, others)
    trained = [_trained(g, algorithm, a) for g, a in zip(kept, advantages, strict=True)]
    counts = [np.array([_sampled(s) for s, _ in pairs], dtype=np.int64) for pairs in trained]
    weights = token_weights(counts, algorithm.aggregation, algorithm.constant_length_tokens)

    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("token_ids", "advantages", "logprobs", "weights", "versions")
    }
    bounds, prompt_lengths = [0], []
    for group, pairs, group_weights in zip(kept, trained, weights, strict=True):
        prompt = prompts[group.prompt_id]
        for (sample, advantage), weight in zip(pairs, group_weights, strict=True):
            p, n = len(prompt), len(sample.token_ids)
            mask = _sampled_mask(sample)
            columns["token_ids"].append(np.array([*prompt, *sample.token_ids], dtype="<i4"))
            columns["advantages"].append(_padded(p, advantage, 0.0))
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
        routes=b"".join(s.routes for pairs in trained for s, _ in pairs),
        probe=list(range(min(probe, len(prompt_lengths)))),
        **flags,
    )
    flat = [
        (prompts[g.prompt_id], s) for g, pairs in zip(kept, trained, strict=True) for s, _ in pairs
    ]
    found = rollout_metrics(step, groups, kept)
    if algorithm.length_penalty != "none":
        penalties = [
            p for g in kept for p in _penalties(g, baseline_samples(g, algorithm), algorithm)
        ]
        found["length_penalty_mean"] = float(np.mean(penalties)) if penalties else 0.0
    return BuiltBatch(batch, kept, found, flat[: len(batch.probe)])


def baseline_samples(group: Group, algorithm: Algorithm) -> list[Sample]:
    """Completions whose rewards make the group's baseline."""
    return group.usable if algorithm.truncated == "drop" else group.rewarded


def is_dropped(group: Group, algorithm: Algorithm) -> bool:
    """Whether a complete group teaches nothing, and is left out of the batch."""
    samples = baseline_samples(group, algorithm)
    if len(samples) < 2 or not (group.usable or algorithm.truncated == "train"):
        return True
    return algorithm.zero_variance_filter and len({group.reward(s) for s in samples}) == 1


def shaped_rewards(group: Group, samples: list[Sample], algorithm: Algorithm) -> np.ndarray:
    """Verified rewards with the length penalty."""
    verified = np.array([_reward(group, s) for s in samples], dtype=np.float64)
    return verified + _penalties(group, samples, algorithm)


def _penalties(group: Group, samples: list[Sample], algorithm: Algorithm) -> np.ndarray:
    if algorithm.length_penalty == "none":
        return np.zeros(len(samples))
    longest, cache = algorithm.length_max_tokens, algorithm.length_cache_tokens
    assert longest is not None
    assert cache is not None
    found = length_penalty(np.array([len(s.token_ids) for s in samples]), longest, cache)
    if algorithm.length_penalty == "all":
        return found
    return np.where([group.verdicts[s.index].passed for s in samples], found, 0.0)


def _reward(group: Group, sample: Sample) -> float:
    reward = group.reward(sample)
    assert reward is not None, "completions without a reward are in no baseline"
    return reward


def _trained(
    group: Group, algorithm: Algorithm, advantages: list[np.ndarray]
) -> list[tuple[Sample, np.ndarray]]:
    pairs = zip(baseline_samples(group, algorithm), advantages, strict=True)
    return [
        (s, a) for s, a in pairs if algorithm.truncated == "train" or s.finish_reason != "length"
    ]


def _estimator(algorithm: Algorithm) -> AdvantageEstimator:
    return GroupBaseline(
        algorithm.advantage_normalization,
        algorithm.advantage_baseline,
        algorithm.advantage_std_over,
    )


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


def _sampled_mask(sample: Sample) -> np.ndarray:
    mask = np.ones(len(sample.token_ids), dtype=bool)
    mask[sample.forced[0] : sample.forced[1]] = False
    return mask


def _sampled(sample: Sample) -> int:
    return int(_sampled_mask(sample).sum())


def _padded(prompt_tokens: int, values: np.ndarray, fill: float) -> np.ndarray:
    return np.concatenate([np.full(prompt_tokens, fill), values])
