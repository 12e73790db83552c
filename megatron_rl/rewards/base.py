"""What a verifier says of a completion."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """Kinds of verdict; each is counted in the metrics."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict and its reason. Example: `Verdict(Outcome.WRONG, "41 is not 52")`."""

    verdict: Outcome
    reason: str

    @property
    def passed(self) -> bool:
        """Whether the completion counts as right."""
        return self.verdict is Outcome.CORRECT
