"""A mixture: shares by weight, a curriculum of each task, all resumable."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithm.curriculum import Curriculum
from megatron_rl.data.mixture import Mixture
from megatron_rl.data.question import DataError

SIZES = {"math": 40, "code": 25}


def curriculum(size: int) -> Curriculum:
    return Curriculum(size, 5, threshold=0.9, statistic="last", at_least=4)


def mixture(weights: dict[str, float] | None = None, seed: int = 1) -> Mixture:
    curricula = {task: curriculum(size) for task, size in SIZES.items()}
    return Mixture(curricula, SIZES, weights or {"math": 3.0, "code": 1.0}, seed)


@given(st.floats(0.05, 20), st.floats(0.05, 20), st.integers(0, 100))
def test_every_prefix_has_the_shares_to_within_one_prompt_per_task(
    a: float, b: float, seed: int
) -> None:
    m = mixture({"math": a, "code": b}, seed)
    counts: Counter[str] = Counter()
    for n in range(1, 120):
        counts[m.task_of(m.next())] += 1
        assert abs(counts["math"] - n * a / (a + b)) <= 2.0


def test_ids_are_global_and_belong_to_their_task() -> None:
    m = mixture()
    assert [m.task_of(i) for i in (0, 39, 40, 64)] == ["math", "math", "code", "code"]
    with pytest.raises(IndexError):
        m.task_of(65)
    drawn = Counter(m.next() for _ in range(48))
    assert set(drawn) <= set(range(65))
    assert max(drawn.values()) == 1  # neither task has begun a second epoch


def test_each_task_has_its_own_curriculum() -> None:
    m = mixture()
    for _ in range(100):
        prompt = m.next()
        m.record(prompt, 1.0 if m.task_of(prompt) == "math" and prompt < 20 else 0.25)
    assert m.curricula["math"].excluded == 20
    assert m.curricula["code"].excluded == 0
    assert m.excluded == 20
    # Solved prompts of one task are drawn no more; the shares stay.
    later = [m.next() for _ in range(80)]
    assert not {p for p in later if p < 20}
    assert Counter(m.task_of(p) for p in later)["math"] == 60


def test_a_resumed_mixture_draws_what_the_first_would_have() -> None:
    first = mixture()
    for _ in range(37):
        first.record(first.next(), 0.95)
    state: dict[str, Any] = json.loads(json.dumps(first.state()), object_hook=_int_keys)
    second = mixture()
    second.restore(state)
    assert [second.next() for _ in range(60)] == [first.next() for _ in range(60)]


def _int_keys(value: dict[str, Any]) -> dict[Any, Any]:
    return {int(k) if k.lstrip("-").isdigit() else k: v for k, v in value.items()}


def test_a_checkpoint_of_another_mixture_is_refused() -> None:
    state = mixture().state()
    with pytest.raises(DataError, match="made with the mixture"):
        mixture({"math": 1.0, "code": 1.0}).restore(state)


def test_tasks_must_agree() -> None:
    with pytest.raises(
        DataError,
        match=r"tasks with training prompts are \['code', 'math'\], tasks with weights are",
    ):
        mixture({"math": 1.0})
