"""Other interpreters and processes, each with a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

SECONDS = 180.0
"""Limit of one process; importing vLLM on a cold disk is the longest."""


class ProcessFailed(RuntimeError):
    """A process ended badly or not in time; the message is its last line of errors."""


def output_of(
    command: Sequence[str], *, seconds: float = SECONDS, env: Mapping[str, str] | None = None
) -> str:
    """Standard output of a command.

    Raises:
        ProcessFailed: it is not there, ended with an error, or not within `seconds`.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"no answer within {seconds:.0f} s") from None
    except OSError as e:
        raise ProcessFailed(f"{command[0]}: {e.strerror or e}") from None
    if done.returncode:
        raise ProcessFailed(last_line(done.stderr) or f"exit status {done.returncode}")
    return done.stdout


def last_line(text: str) -> str:
    """The last line of a traceback or log that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
