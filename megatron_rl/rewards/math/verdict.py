"""The math verdict, in this process and without a timeout; users call `verify`."""

import re
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from itertools import product

import msgspec
from mpmath import mp

from megatron_rl.rewards.base import Outcome, Verdict
from megatron_rl.rewards.math.compare import same
from megatron_rl.rewards.math.equal import decimals, is_near
from megatron_rl.rewards.math.evaluate import Context, Undefined, evaluate
from megatron_rl.rewards.math.extract import NoAnswer, extract_answer, strip_math_delimiters, unbox
from megatron_rl.rewards.math.forms import Expression, Form, Relation, read_form
from megatron_rl.rewards.math.node import (
    MAX_CHARACTERS,
    MAX_DIGITS,
    Node,
    OverLimit,
    Unreadable,
    number,
    over_length,
)
from megatron_rl.rewards.math.normalize import clean, plain_to_latex, rewrite, text_form, untext
from megatron_rl.rewards.math.units import Unit, split_unit

SHOWN = 80
_HALF = Fraction(1, 2)
_INTEGER = re.compile(r"^([-+]?)0*([0-9]+)$")
_GROUPS = re.compile(r"(?<![\d.,])(\d{1,3})((?: +\d{3})+)(?![\d])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)(?!,)")
# 11,\! 111 has no blank.
_THIN = re.compile(r",(?:\\!|\\,)\s*(?=\d{3}(?!\d))")
_LIST = re.compile(r"-?\d+(?:\.\d+)?(?:\s*,\s+-?\d+(?:\.\d+)?)+")
_DECIMAL_COMMA = re.compile(r"-?(?!\d{1,3},\d{3}$)\d+,\d+|-?0,\d+")
_CHOICE = re.compile(
    r"^(?:(?:the\s+)?(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s*:?\s*)?\(?\s*([A-Ja-dfghj])\s*"
    r"(?:\)\s*[.:]?|[.:](?=\s|\d|\\)|$)\s*(.*)$"
)
_NO_VALUE = re.compile(
    r"(?<![A-Za-z\\])[A-J](?![A-Za-z])|\b(?:or|and)\b|^[-+*/^_=<>(!,]"
    r"|^\\(?:times|div|pm|mp|le|ge|ne|in|cup|cap|to|approx)(?![A-Za-z])"
)
_CLOCK = re.compile(r"^(\d{1,2}):([0-5]\d)(?::00)?\s*(?:([ap])\.?\s*m\.?)?$", re.IGNORECASE)
_ARROW = re.compile(r"\\(?:Rightarrow|rightarrow|to)(?![A-Za-z])")
_MODULUS = re.compile(r"^(?:(.*?)\\equiv)?\s*(-?\d+)\s*\(?\\pmod\s*\{?\s*(\d+)\s*\}?\)?$")
_APPROXIMATION = re.compile(r"^(.*[\d)}A-Za-z].*?)\s*\\(?:approx|sim)\s*([-\d.]+)(.*)$")
_PARTS = re.compile(r"\s*[;,]?\s*\(\s*([1-5]|i{1,3}|iv|v|[a-e])\s*\)\s*")
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*$")
_LABELS = (["1", "2", "3", "4", "5"], ["i", "ii", "iii", "iv", "v"], ["a", "b", "c", "d", "e"])
_FOR_MATH_VERIFY = re.compile(
    r"\\(?:sum|prod|int|iint|oint|lim|setminus|cap|complement|det|operatorname|partial|nabla|Re|Im"
    r"|arcsec)(?![A-Za-z])|\\begin\{"
)


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
    a, g = _INTEGER.match(answer), _INTEGER.match(gold)
    if a is not None and g is not None:  # digit by digit, at any length
        same_sign = a[2] == "0" or (a[1] == "-") == (g[1] == "-")
        return right if a[2] == g[2] and same_sign else wrong
    if len(answer) > MAX_CHARACTERS:
        raise over_length(answer)
    answer, gold = normal(answer), normal(gold)
    texts = [text_form(t) for t in (answer, gold)]
    if texts[0] == texts[1]:
        return right
    if "\\" in answer + gold and texts[0].isalpha() and texts[0].casefold() == texts[1].casefold():
        return right  # \\text{Red} is red
    for special in (_same_time, _same_choice, _same_residue):
        if (decided := special(answer, gold)) is not None:
            return right if decided else wrong
    if not _ARROW.search(gold) and "\\lim" not in answer:
        answer = _ARROW.split(answer)[-1].strip()  # the conclusion
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
        unread = [t for t, r in ((answer, answers), (gold, golds)) if not r.readings]
        if all(map(_FOR_MATH_VERIFY.search, unread)):
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
    text = _THIN.sub(",", text) if ",\\" in text else text
    text = clean(plain_to_latex(rewrite(text.replace("\\!", ""))))
    if "," in text and _LIST.fullmatch(text):
        text = text.replace(",", ";")  # 32, 349 is no number
    text = re.sub(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d{3}(?!\d))", ",", text)
    text = re.sub(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d)", ".", text)
    text = re.sub(r"\s*,\s*", ",", text)
    text = _GROUPS.sub(lambda m: m[1] + m[2].replace(" ", ""), text)
    return text.strip().rstrip(".,").strip()


@lru_cache(maxsize=4096)
def read(text: str, *, is_gold: bool) -> Readings:
    """Return the readings of a normalized text, the most likely first."""
    readings: dict[Reading, None] = {}
    error, over_limit = "", False
    rounded = "\\approx" in text or "\\sim" in text
    if rounded and (match := _APPROXIMATION.match(text)) is not None:
        exact = read(match[1].strip(), is_gold=is_gold)
        decimal = read((match[2] + match[3]).strip(), is_gold=is_gold)
        if _is_rounded(exact, decimal):
            return exact
    for value, unit in _candidates(text, is_gold):
        try:
            readings[Reading(read_form(value), unit)] = None
        except OverLimit as e:
            error, over_limit = str(e), True
        except Unreadable as e:
            error = error or str(e)
    return Readings(tuple(readings), error, over_limit)


def _is_rounded(exact: Readings, rounded: Readings) -> bool:
    r"""Return True if `12\pi` comes with its own decimals, and not with another answer."""
    for e, r in product(exact.readings, rounded.readings):
        form = e.form.parts[-1] if isinstance(e.form, Relation) else e.form
        if isinstance(form, Expression) and isinstance(r.form, Expression) and e.unit == r.unit:
            places = decimals(r.form.node)
            if places >= 0 and not form.node.symbols:
                with suppress(OverLimit, Undefined):
                    return is_near(form.node, r.form.node, Fraction(1, 10**places))
    return False


def _candidates(text: str, is_gold: bool) -> Iterator[tuple[str, Unit | None]]:
    labels = _PARTS.findall(text)
    if len(labels) > 1 and any(labels == known[: len(labels)] for known in _LABELS):
        first, *parts = _PARTS.split(text)
        if not first and all(re.search(r"\w\W?$", part) for part in parts[1::2]):
            yield f"({';'.join(parts[1::2])})" if is_gold else ";".join(parts[1::2]), None
    candidates: list[tuple[str, Unit | None]] = [(text, None)]
    if len(items := re.split("[,;]", text)) > 1:
        values = [_DEGREES.sub("", item) for item in items]
        if not any(map(str.__eq__, items, values)):
            candidates = [(";".join(values), Unit("angle"))]
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
        # 3,5 may be the list of 3 and 5, which a gold answer then is.
        if is_gold or "," not in value:
            continue
        if _DECIMAL_COMMA.fullmatch(value):
            yield value.replace(",", "."), unit
        elif re.fullmatch(r"\{[^{}]*,[^{}]*\}", value):
            yield value[1:-1], unit  # braces that do not show


def _same_reading(gold: Reading, answer: Reading) -> bool:
    g, a = gold.unit, answer.unit
    if (a is not None and a.letter and g is None) or not _percent_agrees(gold, answer):
        return False
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


def _percent_agrees(gold: Reading, answer: Reading) -> bool:
    r"""Return False for readings a factor of 100 apart: 20\% is neither 0.2\% nor 2000\%."""
    signs = [r.unit is not None and r.unit.kind == "percent" for r in (gold, answer)]
    nodes = [r.form.node if isinstance(r.form, Expression) else None for r in (gold, answer)]
    values = [n is not None and n.has("percent") for n in nodes]
    if values[1] or signs[1]:
        if values[0] or signs[0]:
            return signs[0] == signs[1]
            # 0.5 is 50\%, and 50 may be.
        node = nodes[0]
        return values[1] == (
            node is not None and not node.symbols and is_near(node, number(_HALF), _HALF)
        )
    return True


def _scaled(form: Form, size: Fraction, *factors: Node) -> Form:
    if not isinstance(form, Expression):
        return form
    return Expression(Node("mul", (form.node, number(size), *factors)))


def _same_choice(answer: str, gold: str) -> bool | None:
    """Compare multiple-choice answers; None if gold is not a choice, or the answer is a value."""
    pair = [_CHOICE.match(untext(text).replace("\\ ", " ").strip()) for text in (gold, answer)]
    golds, answers = (None if m is None or _NO_VALUE.search(m[2]) else m for m in pair)
    if golds is None or (golds[2] and golds[1].islower()):
        return None
    if answers is None:
        return _compare(answer, golds[2]).passed if golds[2] else None
    same_letter = answers[1].upper() == golds[1].upper()
    if same_letter and golds[2] and answers[2]:
        return _compare(answers[2], golds[2]).passed
    return same_letter


def _same_time(answer: str, gold: str) -> bool | None:
    """Compare times of day; None if gold is not one, or the answer has no colon."""
    pair = [_CLOCK.match(untext(text).strip()) for text in (gold, answer)]
    if pair[0] is None or ":" not in answer:
        return None
    if pair[1] is None:
        return False
    halves = [(m[3] or "").lower() for m in (pair[0], pair[1])]
    shown = [60 * int(m[1]) + int(m[2]) for m in (pair[0], pair[1])]
    if halves[0] == halves[1] or ("" in halves and shown[0] == shown[1]):
        return shown[0] == shown[1]  # without its half of the day, 2:30 may be either
    times = zip(shown, halves, strict=True)
    return len({t % 720 + 720 * (half == "p") if half else t for t, half in times}) == 1


def _same_residue(answer: str, gold: str) -> bool | None:
    """Compare residues; with one modulus, the residue counts as it is written."""
    pair = [_MODULUS.match(text) for text in (gold, answer)]
    g, a = pair
    if g is not None and a is not None:
        names = {text_form(m[1]) for m in (g, a) if m[1]}
        same_class = g[3] == a[3] and int(g[3]) > 0 and (int(g[2]) - int(a[2])) % int(g[3]) == 0
        return same_class and len(names) < 2
    if (match := g or a) is None or not 0 <= int(match[2]) < int(match[3]):
        return None
    return _compare(match[2] if a else answer, match[2] if g else gold).passed
