"""The math verdict, in this process and without a timeout; users call `verify`."""

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import product

import msgspec
from mpmath import mp

from megatron_rl.rewards.base import Outcome, Verdict
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
    number,
    over_length,
)
from megatron_rl.rewards.math.normalize import clean, plain_to_latex, text_form, untext
from megatron_rl.rewards.math.units import Unit, split_unit

SHOWN = 80
_INTEGER = re.compile(r"^([-+]?)0*(\d+)$")
_GROUPS = re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)(?!,)")
_GOLD_CHOICE = re.compile(r"^\(?\s*([A-J])\s*\)?[.:]?(?:\s+(.+))?$")
_CHOICE = re.compile(r"^\(?\s*([A-Ja-j])\s*\)?\s*(?:[.):,]\s*|\s+|$)(.*)$")
_FOR_MATH_VERIFY = re.compile(
    r"\\(?:sum|prod|int|iint|oint|lim|setminus|cap|complement|det|operatorname|partial|nabla|Re|Im"
    r"|arcsec)(?![A-Za-z])|\\begin\{"
)
_CHOICE_WORD = re.compile(r"^(?:option|choice|answer)\s*:?\s*\(?([A-J])\)?[.]?$", re.IGNORECASE)


class Reading(msgspec.Struct, frozen=True):
    """One reading of a text: `5 m` is five meters, or five times m."""

    form: Form
    unit: Unit | None


class Readings(msgspec.Struct, frozen=True):
    """All readings of a text, and the error of the others."""

    readings: tuple[Reading, ...]
    error: str
    over_limit: bool


def math_verdict(
    text: str,
    gold: str,
    *,
    think_end: str = "</think>",
    boxed: bool = False,
    ended_thinking: bool = False,
) -> Verdict:
    """Return the verdict on a completion, or only an answer.

    There is no answer before `think_end`, which `ended_thinking` requires; `boxed` accepts only a
    box.
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
        reason = f"gold answer {shorten(gold)}: a box is not closed, or too large"
        return Verdict(Outcome.UNPARSABLE, reason)
    try:
        return _compare(answer, gold)
    except (OverLimit, RecursionError) as e:
        problem = e if isinstance(e, OverLimit) else "nested too deep"
        return Verdict(Outcome.TIMED_OUT, f"{shorten(answer)}: {problem}")


def shorten(text: str) -> str:
    """Shorten a text for a reason."""
    text = " ".join(text[: 2 * SHOWN].split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _compare(answer: str, gold: str) -> Verdict:
    right = Verdict(Outcome.CORRECT, f"{shorten(answer)} is {shorten(gold)}")
    wrong = Verdict(Outcome.WRONG, f"{shorten(answer)} is not {shorten(gold)}")
    if answer == gold:
        return right
    if len(answer) > MAX_DIGITS + 1:
        raise over_length(answer, MAX_DIGITS)
    integers = [_INTEGER.match(t) for t in (answer, gold)]
    if integers[0] is not None and integers[1] is not None:
        # Digit by digit, at any length.
        signs = [m[1].replace("+", "") if m[2] != "0" else "" for m in integers if m is not None]
        return right if integers[0][2] == integers[1][2] and signs[0] == signs[1] else wrong
    if len(answer) > MAX_CHARACTERS:
        raise over_length(answer)
    answer, gold = normal(answer), normal(gold)
    if text_form(answer) == text_form(gold):
        return right
    if (choice := _compare_choice(answer, gold)) is not None:
        return right if choice else wrong
    return _compare_readings(answer, gold, right, wrong)


def _compare_readings(answer: str, gold: str, right: Verdict, wrong: Verdict) -> Verdict:
    golds, answers = read(gold, is_gold=True), read(answer, is_gold=False)
    limit = undefined = ""
    for g, a in product(golds.readings, answers.readings):
        try:
            if _same_reading(g, a):
                return right
        except OverLimit as e:
            limit = str(e)
        except Undefined as e:
            undefined = str(e)
            if not _has_value(g.form):
                return Verdict(Outcome.UNPARSABLE, f"gold answer {shorten(gold)} has no value: {e}")
    if limit or answers.over_limit or (golds.over_limit and not golds.readings):
        raise OverLimit(limit or answers.error or golds.error)
    if not (golds.readings and answers.readings):
        if _FOR_MATH_VERIFY.search(answer) or _FOR_MATH_VERIFY.search(gold):
            from megatron_rl.rewards.math import stock

            if (decided := stock.verify(answer, gold)) is not None:
                return right if decided else wrong
        if golds.readings:
            return Verdict(Outcome.UNPARSABLE, f"answer {shorten(answer)}: {answers.error}")
        return Verdict(Outcome.UNPARSABLE, f"gold answer {shorten(gold)}: {golds.error}")
    return Verdict(Outcome.WRONG, f"{wrong.reason} ({undefined})") if undefined else wrong


def is_readable(gold: str) -> bool:
    """Return True if a gold answer can be parsed here or by math-verify."""
    try:
        text = strip_math_delimiters(unbox(gold))
    except (NoAnswer, OverLimit):
        return False
    if not 0 < len(text) <= MAX_CHARACTERS:
        return False
    text = normal(text)
    return bool(read(text, is_gold=True).readings or _FOR_MATH_VERIFY.search(text))


def _has_value(form: Form) -> bool:
    """Return False for a constant expression without a value, True for anything else."""
    if not isinstance(form, Expression) or form.node.symbols:
        return True
    try:
        with mp.workdps(100):
            evaluate(form.node, Context())
    except (Undefined, ZeroDivisionError, OverflowError):
        return False
    return True


@lru_cache(maxsize=4096)
def normal(text: str) -> str:
    r"""Return the spelling that is parsed. Example: `1{,}234\ \text{km}` -> `1,234 \text{km}`."""
    text = clean(plain_to_latex(text.replace("\\!", "")))
    text = re.sub(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d{3}(?!\d))", ",", text)
    text = re.sub(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d)", ".", text)
    text = re.sub(r"\s*,\s*", ",", text)
    text = _GROUPS.sub(lambda m: m[1] + m[2].replace(" ", ""), text)
    return text.strip().rstrip(".,").strip()


@lru_cache(maxsize=4096)
def read(text: str, *, is_gold: bool) -> Readings:
    """Return the readings of a normalized text, the most likely first."""
    readings: list[Reading] = []
    error, over_limit = "", False
    for value, unit in _candidates(text, is_gold):
        try:
            reading = Reading(read_form(value), unit)
        except OverLimit as e:
            error, over_limit = str(e), True
        except Unreadable as e:
            error = error or str(e)
        else:
            if reading not in readings:
                readings.append(reading)
    return Readings(tuple(readings), error, over_limit)


def _candidates(text: str, is_gold: bool) -> Iterator[tuple[str, Unit | None]]:
    candidates: list[tuple[str, Unit | None]] = [(text, None)]
    if (with_unit := split_unit(text, letters=not is_gold)) is not None:
        candidates.append(with_unit)
    for value, unit in candidates:
        value = value.strip().rstrip(",")
        # 1,234 is one number or two.
        if _THOUSANDS.search(value) and not re.search(r"[(\[{]", value):
            yield _THOUSANDS.sub(lambda m: m[0].replace(",", ""), value), unit
            yield value.replace(",", ";"), unit
        else:
            yield value, unit


def _same_reading(gold: Reading, answer: Reading) -> bool:
    g, a = gold.unit, answer.unit
    forms = [gold.form, answer.form]
    if g is not None and a is not None:
        if not g.agrees(a):
            return False
        if g.size != a.size and g.kind == a.kind:
            forms = [_scaled(gold.form, g.size), _scaled(answer.form, a.size)]
    elif (unit := g or a) is not None and unit.kind == "angle":
        degrees = 0 if g else 1
        other = forms[1 - degrees]
        if isinstance(other, Expression) and other.node.has("pi"):
            forms[degrees] = _scaled(forms[degrees], Fraction(1, 180), Node("pi"))
    return same(forms[0], forms[1])


def _scaled(form: Form, size: Fraction, *factors: Node) -> Form:
    if not isinstance(form, Expression):
        return form
    return Expression(Node("mul", (form.node, number(size), *factors)))


def _compare_choice(answer: str, gold: str) -> bool | None:
    """Compare multiple-choice answers; None if gold is not a choice, or the answer is a value."""
    gold_choice = _GOLD_CHOICE.match(untext(gold).replace("\\ ", " ").strip())
    if gold_choice is None or (gold_choice[2] and not gold.lstrip().startswith(("(", "\\text"))):
        return None
    text = untext(answer).strip()
    match = _CHOICE_WORD.match(text) or _CHOICE.match(text)
    if match is None or (match.re is _CHOICE and re.match(r"[-+*/^_=(!]", match[2])):
        return _compare(text, gold_choice[2]).passed if gold_choice[2] else None
    return match[1].upper() == gold_choice[1]
