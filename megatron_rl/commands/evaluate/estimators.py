"""mean@n, pass@k and majority@n with standard errors, over prompts with n samples each.

`passed` is a bool array [prompts, n]. `answers` is an object array of the same shape: equal answers
are equal, None is no answer.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Estimate = dict[str, float | None]
"""`value`, and `standard_error` over prompts: sd / sqrt(prompts), None for one prompt."""


def mean_at_n(passed: NDArray[Any]) -> Estimate:
    """Estimate the pass rate."""
    return _over_prompts(passed.mean(axis=1))


def pass_at_k(passed: NDArray[Any], k: int) -> Estimate:
    """Estimate the probability that one of k <= n samples passes: `1 - C(n-c, k) / C(n, k)`."""
    n = passed.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of prompts with {n} samples: k must be in 1..{n}")
    return _over_prompts([1 - math.comb(n - int(c), k) / math.comb(n, k) for c in passed.sum(1)])


def majority_at_n(answers: NDArray[Any], passed: NDArray[Any]) -> Estimate:
    """Estimate the fraction of prompts whose most common answer is correct.

    An answer is correct if every sample with it passed. Of w tied answers, each counts 1/w (the
    expectation of a random choice). A prompt without any answer counts 0.
    """
    return _over_prompts([_majority(a, p) for a, p in zip(answers, passed, strict=True)])


def _majority(answers: NDArray[Any], passed: NDArray[Any]) -> float:
    votes = Counter(a for a in answers if a is not None)
    winners = [a for a, n in votes.items() if n == max(votes.values())]
    failed = set(answers[~passed])
    return sum(a not in failed for a in winners) / len(winners) if winners else 0.0


def _over_prompts(values: Sequence[float] | NDArray[Any]) -> Estimate:
    array = np.asarray(values, dtype=np.float64)
    error = None if len(array) == 1 else float(array.std(ddof=1) / math.sqrt(len(array)))
    return {"value": float(array.mean()), "standard_error": error}


def estimates(passed: NDArray[Any], answers: NDArray[Any] | None) -> dict[str, Any]:
    """Return all estimates, k = 1, 2, 4 ... and n; without `answers` there is no majority."""
    n = passed.shape[1]
    ks = sorted({*(2**i for i in range(n.bit_length())), n})
    return {
        "num_prompts": len(passed),
        "mean_at_n": mean_at_n(passed),
        "pass_at_k": {str(k): pass_at_k(passed, k) for k in ks},
        "majority_at_n": None if answers is None else majority_at_n(answers, passed),
    }


def by_difficulty(
    levels: Sequence[str], passed: NDArray[Any], answers: NDArray[Any] | None
) -> list[dict[str, Any]]:
    """Return the estimates of each level, in order of numbers, then names; [] for one level."""
    rows = []
    for level in sorted(set(levels), key=_order):
        index = np.array([x == level for x in levels])
        part = None if answers is None else answers[index]
        rows.append({"difficulty": level, **estimates(passed[index], part)})
    return rows if len(rows) > 1 else []


def _order(level: str) -> tuple[float, str]:
    number = re.search(r"\d+(\.\d+)?", level)
    return (float(number[0]) if number else math.inf, level)
