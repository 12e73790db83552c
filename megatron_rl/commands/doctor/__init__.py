"""`megatron-rl doctor`: checks whether this machine can run what is installed, with remedies.

Anything that a check imports or starts may be broken: an error becomes a failed line, and a
separate process probes the generators' interpreter. Importing this package needs no torch.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one check."""

    status: Literal["ok", "note", "fail"]  # note: unlike a GPU node, but it does not matter here
    detail: str
    remedy: str = ""  # never empty if the check failed
