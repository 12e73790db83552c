"""A question with its right answer, before it becomes a tokenized prompt."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rl.rewards.math.extract import NoAnswer, bare_answer, last_box, strip_math_delimiters
from megatron_rl.rewards.math.node import OverLimit

BOX_INSTRUCTION = "Put the final answer in \\boxed{}."
INSTRUCTIONS = {
    "math": BOX_INSTRUCTION,
    "code": "Answer with one complete Python program in a ```python block.",
}
"""The answer-format instruction of each verifier that needs one."""

_ASKS_FOR_BOX = re.compile(
    r"(?:answer|result|solution|output|put|enclose|wrap|答|结果)[^.\n]{0,80}?"
    r"(?:\\f?box|\bboxed\b|\b(?:in|within|inside) (?:a|the) box\b)"
    r"|\\f?box(?:ed)?\b[^.\n]{0,40}(?:answer|result|solution)"
    r"|\bbox (?:your|the) (?:final )?(?:answer|result|solution)",
    re.IGNORECASE,
)


class DataError(ValueError):
    """A data set that cannot be used; the message names file, row and remedy."""


@dataclass(frozen=True, slots=True)
class Question:
    """Example: `Question("aime/3", "math", "Find the sum ...", "204", difficulty="hard")`."""

    id: str  # unique in its data set, and the same in every run
    kind: str  # verifier: `exact`, `math`, `code`, `reasoning`, `custom`, or an import path
    prompt: str  # text of the question, without any chat template
    gold: str  # right answer; JSON of the tests for `code`
    meta: dict[str, Any] = field(default_factory=dict)  # further arguments of the verifier; JSON
    difficulty: str = ""  # level for the per-difficulty table; empty if there is none


def apply_template(question: Question, template: str | None) -> Question:
    """Format the question with `template`; None appends the verifier's answer-format instruction.

    A prompt that already asks for it, for a box in any words, is left as it is.
    """
    if template is not None:
        return replace(question, prompt=template.replace("{prompt}", question.prompt))
    instruction = INSTRUCTIONS.get(question.kind, "")
    asks = question.kind == "math" and _ASKS_FOR_BOX.search(question.prompt)
    if asks or question.prompt.rstrip().endswith(instruction):
        return question
    return replace(question, prompt=f"{question.prompt}\n{instruction}")


def fingerprint(questions: Iterable[Question]) -> str:
    """Hash all questions in order: a resumed run rejects a changed data set."""
    digest = hashlib.blake2b(digest_size=16)
    for q in questions:
        digest.update("\0".join((q.id, q.kind, q.prompt, q.gold, "\1")).encode())
    return digest.hexdigest()


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
