"""Verdicts on completions, and the errors that are not verdicts."""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec


class Outcome(StrEnum):
    """Kinds of verdict; each is counted in the metrics."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # thinking did not end, no box, an empty or unclosed box, no code block
    UNPARSABLE = "unparsable"
    """The answer, or the gold answer, cannot be parsed into anything comparable."""
    TIMED_OUT = "timed_out"
    """The comparison, not a program under test, exceeded its time, memory or size limit, or the
    verifier failed."""


class Verdict(msgspec.Struct, frozen=True):
    """An outcome and its reason.

    Example: `Verdict(Outcome.WRONG, "41 is not 52")`, or with a graded reward
    `Verdict(Outcome.WRONG, "3 of 4 tests", reward=0.5)`.
    """

    outcome: Outcome = msgspec.field(name="verdict")  # the key that checkpoints have
    reason: str
    reward: float | None = None  # replaces the reward of the outcome (`verifier.values`) if given

    @property
    def passed(self) -> bool:
        """True if the completion is correct."""
        return self.outcome is Outcome.CORRECT


Verifier = Callable[[str, str, dict[str, Any]], Verdict]  # (completion, gold, meta) -> verdict


class VerifierError(RuntimeError):
    """A verifier cannot give verdicts; the run stops or retries, and nothing gets reward 0."""


class VerifierDown(VerifierError):
    """Workers of the verifier died or did not start, and restarting them did not help."""


class SandboxUnavailable(VerifierError):
    """The host offers no isolation that is strong enough to run a model's code."""
