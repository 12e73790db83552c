"""The maths verdict, in this process and without a time-out: users call `verify`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from megatron_rl.rewards.base import Outcome, Verdict
from megatron_rl.rewards.math import stock
from megatron_rl.rewards.math.compare import same
from megatron_rl.rewards.math.evaluate import Context, Undefined, evaluate
from megatron_rl.rewards.math.extract import NoAnswer, extract_answer, strip_math_delimiters, unbox
from megatron_rl.rewards.math.forms import Expression, Form, read_form
from megatron_rl.rewards.math.node import (
    MAX_CHARACTERS,
    MAX_DIGITS,
    Node,
    OverLimit,
    Unreadable,
)
from megatron_rl.rewards.math.normalize import clean, plain_to_latex, text_form, untext
from megatron_rl.rewards.math.units import Unit, split_unit

SHOWN = 80
_INTEGER = re.compile(r"^([-+]?)0*(\d+)$")
_GROUPS = re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)(?!,)")
_GOLD_CHOICE = re.compile(r"^\(?\s*([A-J])\s*\)?[.:]?(?:\s+(.+))?$")
_CHOICE = re.compile(r"^\(?\s*([A-Ja-j])\s*\)?\s*(?:[.):,]\s*|\s+|$)(.*)$")
_CHOICE_WORD = re.compile(r"^(?:option|choice|answer)\s*:?\s*\(?([A-J])\)?[.]?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a text: `5 m` is five metres, or five times m."""

    form: Form
    unit: Unit | None


@dataclass(frozen=True, slots=True)
class Readings:
    """All ways to read a text, and what went wrong with the others."""

    found: tuple[Reading, ...]
    error: str
    over_limit: bool


def judge(
    text: str,
    gold: str,
    *,
    think_end: str = "</think>",
    boxed: bool = False,
    ended_thinking: bool = False,
) -> Verdict:
    """Verdict on a completion or an answer.

    Args:
        text: completion, or an answer alone.
        gold: right answer.
        think_end: what is before it is no answer.
        boxed: only a box is an answer.
        ended_thinking: a text without `think_end` has no answer.
    """
    try:
        answer = extract_answer(text, think_end, boxed=boxed, ended_thinking=ended_thinking)
    except NoAnswer as e:
        return Verdict(Outcome.NO_ANSWER, str(e))
    except OverLimit as e:
        return Verdict(Outcome.TIMED_OUT, str(e))
    try:
        gold = strip_math_delimiters(unbox(gold))
    except (NoAnswer, OverLimit):
        reason = f"gold answer {shown(gold)}: a box is not closed, or too large"
        return Verdict(Outcome.UNPARSABLE, reason)
    try:
        return _judge(answer, gold)
    except OverLimit as e:
        return Verdict(Outcome.TIMED_OUT, f"{shown(answer)}: {e}")
    except RecursionError:
        return Verdict(Outcome.TIMED_OUT, f"{shown(answer)}: nested too deep")


def shown(text: str) -> str:
    """The text, short enough for a reason."""
    text = " ".join(text[: 2 * SHOWN].split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _judge(answer: str, gold: str) -> Verdict:
    right = Verdict(Outcome.CORRECT, f"{shown(answer)} is {shown(gold)}")
    wrong = Verdict(Outcome.WRONG, f"{shown(answer)} is not {shown(gold)}")
    if answer == gold:
        return right
    if len(answer) > MAX_DIGITS + 1:
        raise OverLimit(f"an answer of {len(answer)} characters: over the limit of {MAX_DIGITS}")
    integers = [_INTEGER.match(t) for t in (answer, gold)]
    if integers[0] is not None and integers[1] is not None:
        # Digit by digit: the length of an integer doesn't matter.
        signs = [m[1].replace("+", "") if m[2] != "0" else "" for m in integers if m is not None]
        return right if integers[0][2] == integers[1][2] and signs[0] == signs[1] else wrong
    if len(answer) > MAX_CHARACTERS:
        raise OverLimit(
            f"an answer of {len(answer)} characters: over the limit of {MAX_CHARACTERS}"
        )
    answer_text, gold_text = normal(answer), normal(gold)
    if text_form(answer_text) == text_form(gold_text):
        return right
    choice = _judge_choice(answer_text, gold_text)
    if choice is not None:
        return right if choice else wrong
    return _judge_readings(answer_text, gold_text, right, wrong)


def _judge_readings(answer: str, gold: str, right: Verdict, wrong: Verdict) -> Verdict:
    golds, answers = readings(gold, is_gold=True), readings(answer, is_gold=False)
    limit = undefined = ""
    for g in golds.found:
        for a in answers.found:
            try:
                if _same_reading(g, a):
                    return right
            except OverLimit as e:
                limit = str(e)
            except Undefined as e:
                undefined = str(e)
                if not has_value(g.form):
                    reason = f"gold answer {shown(gold)} has no value: {e}"
                    return Verdict(Outcome.UNPARSABLE, reason)
    if limit or answers.over_limit or (golds.over_limit and not golds.found):
        raise OverLimit(limit or answers.error or golds.error)
    if not (golds.found and answers.found):
        whose, error = ("answer", answers.error) if golds.found else ("gold answer", golds.error)
        decided = stock.verify(answer, gold)
        if decided is not None:
            return right if decided else wrong
        which = shown(answer if golds.found else gold)
        return Verdict(Outcome.UNPARSABLE, f"{whose} {which}: {error}")
    return Verdict(Outcome.WRONG, f"{wrong.reason} ({undefined})") if undefined else wrong


def is_readable(gold: str) -> bool:
    """Whether an answer can be right by more than its text: read here, or by math-verify."""
    try:
        text = strip_math_delimiters(unbox(gold))
    except (NoAnswer, OverLimit):
        return False
    if not 0 < len(text) <= MAX_CHARACTERS:
        return False
    text = normal(text)
    return bool(readings(text, is_gold=True).found) or stock.is_asked(text)


def has_value(form: Form) -> bool:
    """Whether a constant expression has a value; anything else counts as having one."""
    if not isinstance(form, Expression) or form.node.symbols:
        return True
    try:
        evaluate(form.node, Context())
    except (Undefined, ZeroDivisionError, OverflowError):
        return False
    return True


@lru_cache(maxsize=4096)
def normal(text: str) -> str:
    r"""The spelling that is read. Example: `1{,}234\ \text{km}` -> `1,234 \text{km}`."""
    text = clean(plain_to_latex(text.replace("\\!", "")))
    text = re.sub(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d{3}(?!\d))", ",", text)
    text = re.sub(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d)", ".", text)
    text = re.sub(r"\s*,\s*", ",", text)
    text = _GROUPS.sub(lambda m: m[1] + m[2].replace(" ", ""), text)
    return text.strip().rstrip(".,").strip()


@lru_cache(maxsize=4096)
def readings(text: str, *, is_gold: bool) -> Readings:
    """The ways to read a normalized text, the likeliest first."""
    found: list[Reading] = []
    error, over_limit = "", False
    for value, unit in _candidates(text, is_gold):
        try:
            reading = Reading(read_form(value), unit)
        except OverLimit as e:
            error, over_limit = str(e), True
        except Unreadable as e:
            error = error or str(e)
        else:
            if reading not in found:
                found.append(reading)
    return Readings(tuple(found), error, over_limit)


def _candidates(text: str, is_gold: bool) -> Iterator[tuple[str, Unit | None]]:
    whole_texts: list[tuple[str, Unit | None]] = [(text, None)]
    found = split_unit(text, letters=not is_gold)
    for value, unit in whole_texts + ([found] if found else []):
        whole = value.strip().rstrip(",")
        # 1,234 is a number, or two of them.
        if _THOUSANDS.search(whole) and not re.search(r"[(\[{]", whole):
            yield _THOUSANDS.sub(lambda m: m[0].replace(",", ""), whole), unit
            yield whole.replace(",", ";"), unit
        else:
            yield whole, unit


def _same_reading(gold: Reading, answer: Reading) -> bool:
    g, a = gold.unit, answer.unit
    if g is not None and a is not None:
        if not g.agrees(a):
            return False
        if g.size != a.size and g.kind == a.kind:
            return same(_scaled(gold.form, g.size), _scaled(answer.form, a.size))
        return same(gold.form, answer.form)
    unit = g or a
    if unit is not None and unit.kind == "angle":
        other, value = (answer.form, gold.form) if g else (gold.form, answer.form)
        if isinstance(other, Expression) and other.node.has("pi"):
            radians = _scaled(value, Fraction(1, 180), Node("pi"))
            return same(radians, other) if g else same(other, radians)
    return same(gold.form, answer.form)


def _scaled(form: Form, size: Fraction, *factors: Node) -> Form:
    if not isinstance(form, Expression):
        return form
    return Expression(Node("mul", (form.node, Node("num", value=size), *factors)))


def _judge_choice(answer: str, gold: str) -> bool | None:
    """Whether the choice is right; None if gold is no choice, or the answer is a value."""
    gold_choice = _GOLD_CHOICE.match(untext(gold).replace("\\ ", " ").strip())
    if gold_choice is None or (gold_choice[2] and not gold.lstrip().startswith(("(", "\\text"))):
        return None
    text = untext(answer).strip()
    match = _CHOICE_WORD.match(text) or _CHOICE.match(text)
    if match is None or (match.re is _CHOICE and re.match(r"[-+*/^_=(!]", match[2])):
        if gold_choice[2]:
            return _judge(text, gold_choice[2]).passed
        return None
    return match[1].upper() == gold_choice[1]
