"""Reasoning tasks: the same for the same seed, different questions, harder at higher levels."""

from __future__ import annotations

import json

import pytest

from megatron_rl.data.question import DataError, fingerprint
from megatron_rl.data.reasoning import make_reasoning
from tests.data.reasoning_tasks import REASONING_TASKS


@pytest.mark.parametrize("task", REASONING_TASKS)
def test_questions_are_distinct_reproducible_and_json(task: str) -> None:
    count = 5 if task == "tower_of_hanoi" else 20
    questions = make_reasoning(task, count=count, seed=1)
    assert len({q.prompt for q in questions}) == len({q.id for q in questions}) == count
    assert fingerprint(questions) == fingerprint(make_reasoning(task, count=count, seed=1))
    assert fingerprint(questions) != fingerprint(make_reasoning(task, count=count, seed=2))
    assert json.loads(json.dumps(questions[0].meta)) == questions[0].meta
    assert questions[0].meta["dataset"] == task


def test_a_higher_level_is_harder() -> None:
    easy = make_reasoning("chain_sum", count=20, seed=1, level=0)
    hard = make_reasoning("chain_sum", count=20, seed=1, level=5)
    terms = [[q.meta["entry"]["metadata"]["num_terms"] for q in qs] for qs in (easy, hard)]
    assert max(terms[0]) < max(terms[1])
    assert sum(terms[0]) < sum(terms[1])
    assert {q.difficulty for q in hard} == {"5"}


def test_options_go_over_the_level() -> None:
    options = {"min_terms": 7, "max_terms": 7}
    questions = make_reasoning("chain_sum", count=5, seed=1, options=options)
    assert {q.meta["entry"]["metadata"]["num_terms"] for q in questions} == {7}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "chain_sums"}, "'chain_sums' is unknown; try chain_sum,"),
        ({"task": "xyzzy"}, "'xyzzy' is unknown; try chain_sum, or see docs"),
        ({"task": "codeio"}, "is unknown"),
        ({"task": "chain_sum", "level": 99}, "has levels 0 to"),
        ({"task": "chain_sum", "options": {"no_such": 1}}, "no_such"),
        ({"task": "tower_of_hanoi", "count": 100}, "only 6 different questions, 100 are needed"),
    ],
)
def test_what_cannot_be_made_is_an_error(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_reasoning(**{"count": 5, "seed": 1, **arguments})  # type: ignore[arg-type]
