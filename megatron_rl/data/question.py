"""A question with its right answer, before it becomes a tokenized prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

BOX_INSTRUCTION = "Put the final answer in \\boxed{}."
INSTRUCTIONS = {
    "math": BOX_INSTRUCTION,
    "code": "Answer with one complete Python program in a ```python block.",
}
"""What follows a question, by the verifier that reads the answer."""


class DataError(ValueError):
    """A data set that cannot be used; the message names file, row and remedy."""


@dataclass(frozen=True, slots=True)
class Question:
    """Example: `Question("aime/3", "math", "Find the sum ...", "204", difficulty="hard")`."""

    id: str
    """Unique in its data set, and the same in every run."""
    kind: str
    """Task kind of the verifier: `exact`, `math`, `code`, `reasoning`, `custom`."""
    prompt: str
    """What is asked, without any chat template."""
    gold: str
    """Right answer; JSON of the tests for `code`."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What the verifier wants beside it; JSON."""
    difficulty: str = ""
    """Level for the per-difficulty table; empty if there is none."""


def instructed(question: Question) -> Question:
    """The question with what its verifier reads asked for; once, where it is asked for already."""
    instruction = INSTRUCTIONS.get(question.kind, "")
    if question.prompt.rstrip().endswith(instruction):
        return question
    return replace(question, prompt=f"{question.prompt}\n{instruction}")


def worded(question: Question, template: str | None) -> Question:
    """The question as a template words it; None: `instructed`."""
    if template is None:
        return instructed(question)
    return replace(question, prompt=template.replace("{prompt}", question.prompt))


def fingerprint(questions: Iterable[Question]) -> str:
    """Hash of all questions in order: a resumed run refuses another data set."""
    digest = hashlib.blake2b(digest_size=16)
    for q in questions:
        digest.update("\0".join((q.id, q.kind, q.prompt, q.gold, "\1")).encode())
    return digest.hexdigest()
