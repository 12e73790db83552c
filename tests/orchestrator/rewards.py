"""Reward functions that the workers of the verifier pool import, and their input text."""

from __future__ import annotations

import time
from typing import Any

PATH = "tests.orchestrator.rewards"


def decode(ids: list[int]) -> str:
    """Return the token ids as text."""
    return " ".join(map(str, ids))


def first_even(completion: str, gold: str, meta: dict[str, Any]) -> bool:
    """Return True if the first token is even."""
    return int(completion.split()[0]) % 2 == 0


def slow_first_even(completion: str, gold: str, meta: dict[str, Any]) -> bool:
    """Return the same, slower than the generators sample."""
    time.sleep(0.005)
    return first_even(completion, gold, meta)


def sometimes_endless(completion: str, gold: str, meta: dict[str, Any]) -> bool:
    """Return the same, but loop forever for a first token below 8."""
    while int(completion.split()[0]) < 8:
        pass
    return first_even(completion, gold, meta)
