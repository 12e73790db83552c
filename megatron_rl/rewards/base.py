"""What a verifier says of a completion, and the errors that are no verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """Kinds of verdict; each is counted in the metrics."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    """Thinking did not end, no box, an empty or unclosed box, no code block."""
    UNPARSABLE = "unparsable"
    """There is an answer, and it (or the gold answer) cannot be read as anything comparable."""
    TIMED_OUT = "timed_out"
    """The comparison, not a program under test, went over its time, memory or size limit."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict and its reason.

    Example: `Verdict(Outcome.WRONG, "41 is not 52")`, or, graded,
    `Verdict(Outcome.WRONG, "3 of 4 tests", reward=0.5)`.
    """

    verdict: Outcome
    reason: str
    reward: float | None = None
    """In place of the outcome's own reward (`verifier.values`), if it is given."""

    @property
    def passed(self) -> bool:
        """Whether the completion counts as right."""
        return self.verdict is Outcome.CORRECT


class VerifierError(RuntimeError):
    """A verifier cannot give verdicts; the run stops or retries, and nothing gets reward 0."""


class VerifierDown(VerifierError):
    """Workers of the verifier died or did not start, and restarting them did not help."""


class SandboxUnavailable(VerifierError):
    """The host offers no isolation that is strong enough to run a model's code."""
