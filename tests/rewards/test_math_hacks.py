"""No answer that a model could learn for its own sake passes for any gold answer of the table."""

from __future__ import annotations

from megatron_rl.rewards.math import math_verdict
from tests.rewards.hacks import GIANTS, hacks
from tests.rewards.test_math_golden import CASES

PER_GOLD = 200
KINDS = {c["gold"]: c["kind"] for c in CASES}


def test_no_generated_wrong_answer_passes_for_any_gold_answer() -> None:
    passed, counts = [], []
    for gold, kind in KINDS.items():
        answers = [answer for _, answer in hacks(gold, kind, PER_GOLD, seed=0)]
        counts.append(len(set(answers)))
        passed += [(gold, a) for a in answers if math_verdict(a, gold).passed]
    assert passed == []
    assert len(counts) > 200
    assert set(counts) == {PER_GOLD}


def test_equal_giants_cancel_to_what_they_are() -> None:
    """The generator's giants are readable, so that they are not rejected for their spelling."""
    for giant in GIANTS:
        assert math_verdict(f"{giant}-{giant}", "0").passed, giant
        assert math_verdict(f"{giant}+7-{giant}", "7").passed, giant
        assert not math_verdict(f"{giant}+7-{giant}", "8").passed, giant
