"""Right answers as data sets write them, and whether a verifier can read them."""

import json
from typing import Any

from megatron_rl.data.question import DataError, Question
from megatron_rl.rewards.math.extract import (
    NoAnswer,
    bare_answer,
    last_box,
    strip_math_delimiters,
)
from megatron_rl.rewards.math.node import OverLimit


def gold_text(value: Any, kind: str) -> str:
    r"""Return the right answer of a row as text.

    For `math`, the entries of a list are one list (OlympiadBench); of a text, what follows its last
    `####` (GSM8K), or else the content of its last box (MATH), or what a solution in the format of
    Minerva declares. Raises `DataError` for a broken box.
    """
    if kind == "math" and isinstance(value, list):
        value = ", ".join(strip_math_delimiters(str(entry)) for entry in value)
    if not isinstance(value, str):
        return json.dumps(value, default=str)
    if kind != "math":
        return value
    value = value.rpartition("####")[2].strip()
    try:
        box = last_box(value)
    except (NoAnswer, OverLimit) as e:
        raise DataError(f"answer {value[:80]!r}: {e}") from None
    if box is None:
        return bare_answer(value) if "I hope it is correct" in value else value
    return box


def unreadable(question: Question) -> str:
    """Return the reason why the verifier can never accept an answer; empty if it can."""
    if question.kind == "code":
        from megatron_rl.rewards.code.cases import read_cases
        from megatron_rl.rewards.code.code_verdict import function_name

        try:
            read_cases(question.gold, function_name(question.meta))
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as e:
            return str(e)[:200]
    if question.kind == "math":
        from megatron_rl.rewards.math.verdict import is_readable

        return "" if is_readable(question.gold) else f"answer {question.gold[:80]!r}"
    return ""
