"""One line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found.

    Example: `Result("port 29500", "fail", "in use by process 4711 (python)", "end it, or ...")`.
    """

    check: str
    status: Literal["ok", "note", "fail"]
    """`note`: not what a GPU node has, and no hindrance here."""
    detail: str
    remedy: str = ""
    """What to do; never empty when the check failed."""


def ok(check: str, detail: str) -> Result:
    """The check passed."""
    return Result(check, "ok", detail)


def note(check: str, detail: str) -> Result:
    """Nothing is wrong; the detail says what differs and why that is enough."""
    return Result(check, "note", detail)


def fail(check: str, detail: str, remedy: str) -> Result:
    """A run would fail or be wrong; the remedy says what to do."""
    return Result(check, "fail", detail, remedy)
