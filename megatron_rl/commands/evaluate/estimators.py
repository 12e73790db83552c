"""mean@n, pass@k and majority@n with standard errors, over prompts with n samples each.

Standard errors are over prompts (the samples of a prompt are not independent of each other):
`sd(per-prompt values) / sqrt(prompts)`, with the sample standard deviation; None for one prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts. Example: `Estimate(0.75, 0.12, 4)`."""

    value: float
    standard_error: float | None
    prompts: int


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the per-difficulty table."""

    difficulty: str
    prompts: int
    mean: Estimate
    passed: dict[int, Estimate]
    """k -> pass@k."""
    majority: Estimate | None


def mean_at_n(passed: Sequence[Sequence[bool]]) -> Estimate:
    """Mean pass rate: `passed[prompt][sample]`.

    Raises:
        ValueError: no prompt, or a prompt without samples.
    """
    _check(passed)
    return _over_prompts([sum(samples) / len(samples) for samples in passed])


def pass_at_k(passed: Sequence[Sequence[bool]], k: int) -> Estimate:
    """Probability that one of k samples passes, unbiased: `1 - C(n-c, k) / C(n, k)` per prompt.

    Args:
        passed: `passed[prompt][sample]`, n samples with c right ones.
        k: at most n.

    Raises:
        ValueError: k below 1 or above a prompt's samples.
    """
    _check(passed)
    fewest = min(len(samples) for samples in passed)
    if not 1 <= k <= fewest:
        raise ValueError(f"pass@{k} of prompts with {fewest} samples: k must be in 1..{fewest}")
    return _over_prompts([_pass_at_k(len(s), sum(s), k) for s in passed])


def _pass_at_k(n: int, c: int, k: int) -> float:
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_n(
    answers: Sequence[Sequence[Hashable | None]], passed: Sequence[Sequence[bool]]
) -> Estimate:
    """Share of prompts whose commonest answer is right.

    A tie is shared: with two commonest answers of which one is right, the prompt counts 1/2 (the
    expectation of a random choice). Samples without an answer (None) have no vote; a prompt without
    any vote counts 0.

    Args:
        answers: `answers[prompt][sample]`, in a form in which equal answers are equal.
        passed: verdicts of the same samples; an answer is right if any sample with it passed.

    Raises:
        ValueError: shapes differ.
    """
    _check(passed)
    if [len(a) for a in answers] != [len(p) for p in passed]:
        raise ValueError("answers and verdicts have different shapes")
    return _over_prompts([_majority(a, p) for a, p in zip(answers, passed, strict=True)])


def _majority(answers: Sequence[Hashable | None], passed: Sequence[bool]) -> float:
    votes = Counter(a for a in answers if a is not None)
    if not votes:
        return 0.0
    right = {a for a, p in zip(answers, passed, strict=True) if p}
    most = max(votes.values())
    winners = [a for a, n in votes.items() if n == most]
    return sum(a in right for a in winners) / len(winners)


def by_difficulty(
    difficulty: Sequence[str],
    passed: Sequence[Sequence[bool]],
    *,
    ks: Sequence[int] = (1,),
    answers: Sequence[Sequence[Hashable | None]] | None = None,
) -> list[Row]:
    """The estimates for each difficulty in order of its name (numbers by value), then for all.

    Raises:
        ValueError: lengths differ, or see `pass_at_k`.
    """
    if len(difficulty) != len(passed):
        raise ValueError(f"{len(difficulty)} difficulties of {len(passed)} prompts")
    rows = []
    for level in [*sorted(set(difficulty), key=_order), None]:
        index = [i for i, d in enumerate(difficulty) if level is None or d == level]
        part = [passed[i] for i in index]
        voted = None if answers is None else majority_at_n([answers[i] for i in index], part)
        rows.append(
            Row(
                difficulty="all" if level is None else level,
                prompts=len(index),
                mean=mean_at_n(part),
                passed={k: pass_at_k(part, k) for k in ks},
                majority=voted,
            )
        )
    return rows


def _order(level: str) -> tuple[int, float, str]:
    digits = "".join(c for c in level if c.isdigit() or c == ".")
    try:
        return (0, float(digits), level)
    except ValueError:
        return (1, 0.0, level)


def _check(passed: Sequence[Sequence[bool]]) -> None:
    if not passed or any(not samples for samples in passed):
        raise ValueError("estimates need at least one prompt, and one sample of each")


def _over_prompts(values: Sequence[float]) -> Estimate:
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return Estimate(mean, math.sqrt(variance / n), n)
