"""A verdict depends on the meaning of an answer, not on its spelling; equality is symmetric."""

from __future__ import annotations

import random
import re
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rewards.base import Outcome
from megatron_rl.rewards.math import math_verdict
from tests.rewards.test_math_golden import CASES

SPELLABLE = [
    c
    for c in CASES
    if c["kind"] not in ("extraction", "unparsable", "text", "units", "choice", "money", "stock")
    and c["verdict"] in ("correct", "wrong")
]
MEANING = [
    c
    for c in SPELLABLE
    if c["kind"] in ("fraction", "radical", "pi", "power", "polynomial", "complex", "set", "tuple")
    and "{0}" not in c["gold"] + c["answer"]  # a gold answer without a value is unparsable
    and c["why"] != "parentheses left out"  # 1, 2 stands for (1, 2), and not the other way round
]
# Tokens may not contain a space: commands with an environment, numbers, operators, names.
TOKEN = re.compile(
    r"\\(?:begin|end)\{[^{}]*\}|\\[A-Za-z]+|\\.|\d[\d.,]*(?:e\d+)?|\.\d+|[<>]=|[A-Za-z]+|.",
    re.DOTALL,
)


def respelt(text: str, rng: random.Random) -> str:
    """Return the same formula with other spaces and fraction commands."""
    tokens = TOKEN.findall(text)
    out = []
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        if token == "\\frac":
            token = rng.choice(["\\frac", "\\dfrac", "\\tfrac"])
        out.append(token)
        # A command before a letter needs its space; \sqrt[3] allows none before `[`.
        if re.match(r"\\[A-Za-z]+$", token) and following[:1].isalpha():
            out.append(" ")
        elif token[:1] not in "\\ ^_" and following not in ("", "}"):
            out.append(rng.choice(["", " ", "\\,", "\\;", " "]))
    return "".join(out)


@given(st.sampled_from(SPELLABLE), st.integers(0, 2**32))
def test_spacing_and_fraction_commands_change_no_verdict(case: dict[str, str], seed: int) -> None:
    rng = random.Random(seed)
    answer, gold = respelt(case["answer"], rng), respelt(case["gold"], rng)
    verdict = math_verdict(answer, gold)
    assert verdict.outcome == case["verdict"], f"{answer!r} | {gold!r}: {verdict.reason}"


def test_left_and_right_change_no_verdict() -> None:
    def spell(text: str) -> str:
        return text.replace("(", "\\left(").replace(")", "\\right)")

    cases = [c for c in SPELLABLE if "(" in c["answer"] + c["gold"]]
    assert len(cases) > 40
    outcomes = [math_verdict(spell(c["answer"]), spell(c["gold"])).outcome for c in cases]
    assert [c for c, outcome in zip(cases, outcomes, strict=True) if outcome != c["verdict"]] == []


def test_equality_of_values_is_symmetric() -> None:
    assert len(MEANING) > 100
    pairs = [(c["answer"], c["gold"]) for c in MEANING]
    asymmetric = [
        (a, g) for a, g in pairs if math_verdict(a, g).outcome != math_verdict(g, a).outcome
    ]
    assert asymmetric == []


@given(st.lists(st.integers(-99, 99), min_size=1, max_size=6, unique=True), st.randoms())
def test_the_order_of_set_members_changes_nothing(members: list[int], rng: random.Random) -> None:
    shuffled = rng.sample(members, len(members))
    gold, answer = (f"\\{{{','.join(map(str, m))}\\}}" for m in (members, shuffled))
    assert math_verdict(answer, gold).passed
    other = [*shuffled[:-1], 100]
    assert not math_verdict(f"\\{{{','.join(map(str, other))}\\}}", gold).passed


@given(st.fractions(-50, 50, max_denominator=99), st.fractions(-50, 50, max_denominator=99))
def test_rationals_are_equal_exactly_when_they_are(a: Fraction, b: Fraction) -> None:
    answer = f"\\frac{{{a.numerator * 3}}}{{{a.denominator * 3}}}"
    verdict = math_verdict(answer, str(b)).outcome
    assert verdict is (Outcome.CORRECT if a == b else Outcome.WRONG)


@given(st.integers(0, 10**60), st.integers(0, 10**60))
def test_integers_are_compared_digit_by_digit(a: int, b: int) -> None:
    assert math_verdict(str(a), f"{a:,}").passed
    assert math_verdict(f"\\boxed{{{a:,}}}", str(a)).passed
    assert math_verdict(str(a), str(b)).passed is (a == b)


@given(
    st.lists(st.integers(-9, 9), min_size=1, max_size=4),
    st.lists(st.integers(-9, 9), min_size=1, max_size=4),
)
def test_products_of_linear_factors_equal_their_expansion(a: list[int], b: list[int]) -> None:
    def expanded(roots: list[int]) -> str:
        coefficients = [1]
        for r in roots:
            shifted = [*coefficients, 0]
            coefficients = [s - r * c for s, c in zip(shifted, [0, *coefficients], strict=True)]
        terms = enumerate(reversed(coefficients))
        return "+".join(f"({c})x^{{{power}}}" for power, c in terms)

    factored = "".join(f"(x-({r}))" for r in a)
    assert math_verdict(factored, expanded(a)).passed
    assert math_verdict(factored, expanded(b)).passed is (sorted(a) == sorted(b))


@given(st.text(alphabet="0123456789\\{}()[]^_+-*/=<>,.;:!|$%&abxyz \n", max_size=60))
def test_any_text_gets_a_verdict_and_a_reason(text: str) -> None:
    verdict = math_verdict(text, "\\frac{1}{2}")
    assert verdict.outcome in Outcome
    assert verdict.reason


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_unicode_text_breaks_it(answer: str, gold: str) -> None:
    assert math_verdict(answer, gold).outcome in Outcome
