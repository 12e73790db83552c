"""The trainer's batch from complete groups: filters, advantages, loss weights; its metrics."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl import messages as m
from megatron_rl.algorithm.advantages import (
    Returns,
    by_turn,
    length_penalty,
    token_weights,
    turn_advantages,
    turn_returns,
)
from megatron_rl.config import Algorithm
from megatron_rl.orchestrator.groups import Group

LONG_COMPLETION_TOKENS = 16
ZERO_ADVANTAGE = 1e-6  # larger ones are no rounding of equal rewards


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """A step's batch and the metrics of its rollouts."""

    batch: m.Batch
    kept: list[Group]  # groups that are trained
    metrics: dict[str, Any]
    probe: m.ScoreRequest  # request for the generator's log-probs of the sequences of `batch.probe`
    # (group, index) of each completion in it -> its advantages and loss weight
    trained: dict[tuple[int, int], tuple[tuple[float, ...], float]]
    teaches: bool  # False if the gradient is zero: Adam's momentum alone would move the weights


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A completion of a batch, or a part of one that has a prompt of its own."""

    prompt: list[int]
    sample: m.Sample
    advantages: tuple[float, ...]  # of each turn, or one of all turns
    loss_weight: float  # of each sampled token
    part: slice = slice(None)  # its tokens in the completion, which follow the prompt
    sequence: int = 0  # number of the part

    def token_advantages(self) -> NDArray[np.float64]:
        """Return [tokens of the completion]: each has its turn's; 0 between turns of their own."""
        if len(self.advantages) == 1:
            return np.full(self.sample.num_tokens, self.advantages[0])
        values = np.zeros(self.sample.num_tokens)
        turns = m.turn_ranges(self.sample.segments)
        for (start, end), advantage in zip(turns, self.advantages, strict=True):
            values[start:end] = advantage
        return values


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
    probed = [one for t in trained[:probe] for one in sequences(t)][:probe]
    batch = batch_of(step, trained, probe=list(range(len(probed))), **flags)
    metrics = rollout_metrics(step, groups, kept)
    metrics["prompts_differing"] = sum(_rewards_differ(g, algorithm) for g in groups)
    if algorithm.length_penalty != "none":
        penalties = [_penalties(g, baseline_samples(g, algorithm), algorithm) for g in kept]
        metrics["length_penalty_mean"] = float(np.concatenate(penalties).mean()) if kept else 0.0
    request = m.ScoreRequest(
        step=step,
        prompts=[t.prompt for t in probed],
        completions=[m.ints(t.sample.token_ids)[t.part].tolist() for t in probed],
    )
    differs = any(t.loss_weight and max(map(abs, t.advantages)) > ZERO_ADVANTAGE for t in trained)
    teaches = differs or (algorithm.has_other_terms and any(t.loss_weight for t in trained))
    values = {(t.sample.group, t.sample.index): (t.advantages, t.loss_weight) for t in trained}
    return BuiltBatch(batch, kept, metrics, request, values, teaches)


def batch_of(step: int, trained: list[TrainedSample], **flags: Any) -> m.Batch:
    """Return the batch of these completions, in their order; `flags` are other fields of it."""
    for t in trained:
        check_lengths(t.sample)
    trained = [one for t in trained for one in sequences(t)]
    bounds = np.cumsum([0, *(len(t.prompt) + t.part.stop - t.part.start for t in trained)])
    return m.Batch(
        step=step,
        bounds=m.int_bytes(bounds), prompt_lengths=m.int_bytes([len(t.prompt) for t in trained]),
        prompt_ids=m.int_bytes([t.sample.prompt_id for t in trained]),
        completion_indices=m.int_bytes([t.sample.index for t in trained]),
        routes=[t.sample.routes[t.sequence] for t in trained if t.sample.routes],
        **_token_arrays(trained, bounds), **flags,
    )  # fmt: skip


def sequences(trained: TrainedSample) -> list[TrainedSample]:
    """Return the sequences of a completion, each with its prompt.

    Example: of tokens `[a b | c d e | f g]`, whose second segment is a prompt, `a b` after the
    question's prompt, and `f g` after `c d e`.
    """
    own = {s.start: s.end for s in trained.sample.segments if s.kind == "prompt"}
    ids = m.ints(trained.sample.token_ids)
    parts = []
    for number, (begin, end) in enumerate(m.sequence_ranges(trained.sample.segments)):
        start = own.get(begin, begin)
        prompt = ids[begin:start].tolist() if begin in own else trained.prompt
        parts.append(replace(trained, prompt=prompt, part=slice(start, end), sequence=number))
    return parts


def dropped_because(group: Group, sample: m.Sample, built: BuiltBatch, algorithm: Algorithm) -> str:
    """Return why a completion of the batch's groups is not trained; empty if it is."""
    if group.failed:
        return "group failed"
    if (group.index, sample.index) in built.trained:
        return "" if built.teaches else "batch had nothing to learn"
    if group.reward(sample) is None:
        return "no reward"
    if algorithm.truncated != "train" and sample.finish_reason == "length":
        return "truncated"
    return "zero variance" if len(baseline_samples(group, algorithm)) > 1 else "no other in group"


def _token_arrays(trained: list[TrainedSample], bounds: np.ndarray) -> dict[str, Any]:
    """Return the fields of a batch that have a value for each token."""
    ids, versions = np.empty(bounds[-1], "<i4"), np.full(bounds[-1], -1, "<i4")
    advantages, logprobs, weights = (np.zeros(bounds[-1], "<f4") for _ in range(3))
    for t, start, end in zip(trained, bounds[:-1], bounds[1:], strict=True):
        first, part, given = start + len(t.prompt), t.part, ~t.sample.sampled()[t.part]
        ids[start:first], ids[first:end] = t.prompt, m.ints(t.sample.token_ids)[part]
        advantages[first:end], weights[first:end] = t.token_advantages()[part], t.loss_weight
        logprobs[first:end] = m.floats(t.sample.logprobs)[part]
        for span in t.sample.spans:
            begin, stop = max(span.start - part.start, 0), max(span.end - part.start, 0)
            versions[first:end][begin:stop] = span.version
        weights[first:end][given], versions[first:end][given] = 0.0, -1
    return {
        "token_ids": ids.tobytes(), "advantages": advantages.tobytes(),
        "generator_logprobs": logprobs.tobytes(), "loss_weights": weights.tobytes(),
        "versions": versions.tobytes(),
    }  # fmt: skip


def _trained_samples(
    groups: list[Group], kept: list[Group], prompts: dict[int, list[int]], algorithm: Algorithm
) -> list[TrainedSample]:
    dropped = [g for g in groups if is_dropped(g, algorithm) and baseline_samples(g, algorithm)]
    others = dropped if algorithm.advantage_std_over == "all" else []
    advantages = turn_advantages(
        [_returns(g, algorithm, penalized=True) for g in kept],
        algorithm.advantage_normalization,
        baseline=algorithm.advantage_baseline,
        others=[_returns(g, algorithm, penalized=True) for g in others],
    )
    pairs = [
        [
            (sample, values)
            for sample, values in zip(baseline_samples(g, algorithm), of_group, strict=True)
            if algorithm.truncated == "train" or sample.finish_reason != "length"
        ]
        for g, of_group in zip(kept, advantages, strict=True)
    ]
    counts = [np.array([s.count("sampled") for s, _ in p], dtype=np.int64) for p in pairs]
    weights = token_weights(counts, algorithm.aggregation, algorithm.constant_length_tokens)
    return [
        TrainedSample(prompts[group.prompt_id], sample, values, float(weight))
        for group, group_pairs, group_weights in zip(kept, pairs, weights, strict=True)
        for (sample, values), weight in zip(group_pairs, group_weights, strict=True)
    ]


def baseline_samples(group: Group, algorithm: Algorithm) -> list[m.Sample]:
    """Return the completions whose rewards form the group's baseline."""
    return group.usable if algorithm.truncated == "drop" else group.rewarded


def is_dropped(group: Group, algorithm: Algorithm) -> bool:
    """Return True if a complete group has no gradient and is left out of the batch."""
    samples = baseline_samples(group, algorithm)
    if len(samples) < 2 or not (group.usable or algorithm.truncated == "train"):
        return True
    return algorithm.zero_variance_filter and not _rewards_differ(group, algorithm)


def _rewards_differ(group: Group, algorithm: Algorithm) -> bool:
    return any(len(set(column)) > 1 for column in by_turn(_returns(group, algorithm)))


def _returns(group: Group, algorithm: Algorithm, *, penalized: bool = False) -> list[Returns]:
    """Return the rewards of the group's baseline from each turn on, or of each rollout."""
    samples = baseline_samples(group, algorithm)
    rewards = np.array([group.reward(s) for s in samples], dtype=np.float64)
    if penalized:
        rewards += _penalties(group, samples, algorithm)
    if algorithm.credit == "rollout":
        return [(reward,) for reward in rewards.tolist()]
    return [
        turn_returns(reward, s.turn_rewards, len(m.turn_ranges(s.segments)))
        for reward, s in zip(rewards.tolist(), samples, strict=True)
    ]


def _penalties(group: Group, samples: list[m.Sample], algorithm: Algorithm) -> np.ndarray:
    if algorithm.length_penalty == "none":
        return np.zeros(len(samples))
    longest, cache = algorithm.length_max_tokens, algorithm.length_cache_tokens
    assert longest is not None and cache is not None
    penalties = length_penalty(np.array([s.own_tokens for s in samples]), longest, cache)
    if algorithm.length_penalty == "all":
        return penalties
    return np.where([group.verdicts[s.index].passed for s in samples], penalties, 0.0)


def check_lengths(sample: m.Sample) -> None:
    """Check that every token of a completion has a log-prob, an origin and a weight version.

    Raises:
        ValueError: it has not, or spans or segments leave a gap.
    """
    tokens, logprobs = sample.num_tokens, len(sample.logprobs) / 4
    covered = all(
        [p.start for p in parts] + [tokens] == [0, *(p.end for p in parts)]
        for parts in (sample.spans, sample.segments)
    )
    if not covered or logprobs != tokens:
        raise ValueError(
            f"completion {sample.index} of group {sample.group}: {logprobs:g} log-probs, version"
            f" spans {sample.spans} and segments {sample.segments} do not cover its {tokens} tokens"
        )


def rollout_metrics(step: int, groups: list[Group], kept: list[Group]) -> dict[str, Any]:
    """Return the rollout part of a step's row; `kept` are the groups that are trained."""
    samples = [s for g in groups for s in g.ordered]
    lags: Counter[int] = Counter()
    for span in (span for s in samples for span in s.spans if span.end > span.start):
        lags[step - span.version] += span.end - span.start
    long = [s for s in samples if s.own_tokens > LONG_COMPLETION_TOKENS]
    return {
        **task_metrics(groups, kept),
        "completions_interrupted": sum(s.count("forced") > 0 for s in samples),
        "tokens": sum(s.own_tokens for s in samples),
        "completion_tokens_max": max(s.own_tokens for s in samples),
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
    # A single turn has only its own tokens.
    talks = [s for s in samples if s.num_tokens > s.own_tokens]
    turns: list[float] = [len(m.turn_ranges(s.segments)) for s in talks]
    means: dict[str, list[float]] = {
        "reward_mean": rewards,
        "train_pass_rate": [p for g in groups if (p := g.pass_rate) is not None],
        "completion_tokens_mean": [s.own_tokens for s in samples],
        "turns_mean": turns,
        "several_turns_fraction": [n > 1 for n in turns],
        "given_tokens_mean": [s.count("given") for s in talks],
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


def _multi_version_fraction(samples: list[m.Sample]) -> float:
    multi = [len({span.version for span in s.spans}) > 1 for s in samples]
    return sum(multi) / max(len(multi), 1)
