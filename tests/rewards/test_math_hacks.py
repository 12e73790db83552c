"""No answer that a model could learn for its own sake passes for any gold answer of the table."""

from __future__ import annotations

from megatron_rl.rewards.math import math_verdict
from tests.rewards.hacks import GIANTS, hacks
from tests.rewards.test_math_golden import CASES

PER_GOLD = 200
KINDS = {c["gold"]: c["kind"] for c in CASES}


def search(gold: str) -> tuple[int, list[str]]:
    """Return the number of different answers made for a gold answer, and those that pass."""
    answers = {answer for _, answer in hacks(gold, KINDS[gold], PER_GOLD, seed=0)}
    return len(answers), [a for a in answers if math_verdict(a, gold).passed]


def assert_none_passes(golds: list[str]) -> None:
    """Search over some gold answers of the table."""
    counts, passed = zip(*map(search, golds), strict=True)
    assert {gold: a for gold, a in zip(golds, passed, strict=True) if a} == {}
    assert len(counts) > 100
    assert set(counts) == {PER_GOLD}


def test_no_generated_wrong_answer_passes_for_any_gold_answer() -> None:
    assert_none_passes(list(KINDS)[::2])  # the others: test_math_hacks_others.py


def test_equal_giants_cancel_to_what_they_are() -> None:
    """The generator's giants are readable, so that they are not rejected for their spelling."""
    for giant in GIANTS:
        assert math_verdict(f"{giant}-{giant}", "0").passed, giant
        assert math_verdict(f"{giant}+7-{giant}", "7").passed, giant
        assert not math_verdict(f"{giant}+7-{giant}", "8").passed, giant
