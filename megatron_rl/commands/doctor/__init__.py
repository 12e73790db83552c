"""`megatron-rl doctor`: checks whether this machine can run what is installed, with remedies.

A check returns a `Result`, or several by name. Anything that it imports or starts may be broken: an
error becomes a failed line, and a separate process probes the generators' interpreter. Importing
this package needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one check.

    Example: `Result("fail", "in use by process 4711 (python)", "end that process, or ...")`.
    """

    status: Literal["ok", "note", "fail"]
    """`note`: a difference from a GPU node that does not matter here."""
    detail: str
    remedy: str = ""
    """Never empty if the check failed."""
