"""The votes of majority@n: answers, in a form in which equal answers are equal."""

from __future__ import annotations

from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.rewards.math.extract import NoAnswer, after_thinking, bare_answer, last_box
from megatron_rl.rewards.math.node import MAX_CHARACTERS, OverLimit
from megatron_rl.rewards.math.normalize import text_form
from megatron_rl.rewards.math.verdict import normal

RIGHT = "right"
"""Right answers are equal to the gold answer, so to each other, however they are written."""
WITHOUT_VOTES = frozenset({"code"})
"""Kinds of task whose answers cannot be counted: two programs are hardly ever the same text."""


def vote(kind: str, text: str, verdict: Verdict, think_end: str) -> str | None:
    """The answer that a completion votes for; None if it has none, or its kind has no votes.

    Args:
        kind: verifier of its prompt.
        text: completion.
        verdict: what the verifier said.
        think_end: marker that closes thinking.
    """
    if kind in WITHOUT_VOTES or verdict.outcome is Outcome.NO_ANSWER:
        return None
    if verdict.passed:
        return RIGHT
    try:
        tail = after_thinking(text, think_end, required=False)
        box = last_box(tail)
        answer = bare_answer(tail) if box is None else box
    except (NoAnswer, OverLimit):
        return None
    if len(answer) > MAX_CHARACTERS:
        return None
    return f"= {text_form(normal(answer)) if kind == 'math' else answer.strip()}"
