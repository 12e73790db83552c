"""Answers made to cost time are rejected by their size, before anything is computed or parsed."""

from __future__ import annotations

import pytest

from megatron_rl.rewards.base import Outcome
from megatron_rl.rewards.math import math_verdict, stock
from megatron_rl.rewards.math.extract import MAX_BRACE_DEPTH, MAX_BRACES, last_box
from megatron_rl.rewards.math.node import MAX_DIGITS, MAX_TOKENS, OverLimit
from megatron_rl.rewards.math.verdict import is_readable


def boxed(answer: str) -> str:
    return f"So \\boxed{{{answer}}}"


def test_a_bomb_is_timed_out_by_a_limit_that_its_reason_names() -> None:
    bombs = {
        "{" * 50_000 + "}" * 50_000: "nested over",
        "{}" * MAX_BRACES: "braces",
        "\\frac{" * 1000 + "1" + "}{2}" * 1000: "nested over",
        "7" * 1_000_000: f"over the limit of {MAX_DIGITS}",
        "x+" * 2000 + "x": f"over {MAX_TOKENS} tokens",
        "9^{9^9}": "bits",
        "1" * 5000 + "x": "characters",
    }
    for answer, reason in bombs.items():
        verdict = math_verdict(boxed(answer), "5")
        assert verdict.outcome is Outcome.TIMED_OUT, answer[:40]
        assert reason in verdict.reason


def test_an_answer_that_is_the_gold_answer_to_the_letter_is_right_at_any_length() -> None:
    for text in ("7" * 100_000, "x+" * 3000 + "x"):
        assert math_verdict(boxed(text), text).passed


def test_integers_are_compared_up_to_the_limit_of_digits() -> None:
    digits = "7" * (MAX_DIGITS - 2)
    assert math_verdict(boxed(f"00{digits}"), digits).passed
    assert math_verdict(boxed(f"{digits[:-1]}8"), digits).outcome is Outcome.WRONG


def test_runs_of_backslashes_and_escaped_braces_count_as_before() -> None:
    assert last_box("\\boxed{\\{1\\}}") == "\\{1\\}"
    assert last_box("\\boxed{a\\\\}") == "a\\\\"
    assert last_box("\\boxed{" + "\\\\" * 50_000 + "}") == "\\\\" * 50_000
    assert last_box("\\boxed{" + "{" * 150 + "}" * 150 + "}") == "{" * 150 + "}" * 150
    with pytest.raises(OverLimit):
        last_box("\\boxed{" + "{" * (MAX_BRACE_DEPTH + 1) + "}" * (MAX_BRACE_DEPTH + 1) + "}")


def test_a_gold_answer_is_readable_or_not() -> None:
    golds = {
        "\\frac12": True,
        "$(1, 2)$": True,
        "\\text{no solution}": True,
        "\\sum_{k=1}^{n} k": True,
        "\\boxed{3}": True,
        "\\includegraphics{x}": False,
        "": False,
        "\\boxed{3": False,
        "7" * 5000 + "x": False,
    }
    assert {gold: is_readable(gold) for gold in golds} == golds


def test_numbers_decide_only_what_is_certain() -> None:
    pairs = {
        ("2", "\\int_0^1 x^2 dx"): False,
        ("\\frac13", "\\int_0^1 x^2 dx"): True,
        ("1", "\\lim_{x\\to 0}\\frac{\\sin x}{x}"): True,
        ("1", "\\lim_{x\\to\\infty}\\frac{1}{x}"): False,
        # The numbers are not certain here: algebra decides.
        ("\\frac{\\pi}{2}", "\\int_0^{\\infty}\\frac{\\sin x}{x} dx"): None,
        ("0", "\\lim_{x\\to\\infty}\\frac{1}{\\ln x}"): None,
        ("0", "\\lim_{n\\to\\infty}(-1)^n"): None,
        ("\\frac14", "\\int_0^1\\int_0^1 xy\\,dx\\,dy"): None,
        ("a", "\\int_0^1 a dx"): None,
        ("1", "\\sum_{k=1}^{\\infty}\\frac{1}{2^k}"): None,
        ("5", "5"): None,
    }
    same = {pair: stock.same_number(*map(stock._parse, pair)) for pair in pairs}
    assert same == pairs
