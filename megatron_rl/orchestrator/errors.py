"""How a run ends that cannot go on."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run cannot go on; the message names the role and the remedy."""
