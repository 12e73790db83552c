"""Reward functions that the verifier pool's workers import, and the text that they judge."""

from __future__ import annotations

import time
from typing import Any

PATH = "tests.orchestrator.rewards"


def decode(ids: list[int]) -> str:
    """A completion's text: its token ids."""
    return " ".join(map(str, ids))


def first_even(completion: str, gold: str, meta: dict[str, Any]) -> bool:
    """A completion is right when its first token is even."""
    return int(completion.split()[0]) % 2 == 0


def slow_first_even(completion: str, gold: str, meta: dict[str, Any]) -> bool:
    """The same, with the verifier behind the generators."""
    time.sleep(0.005)
    return first_even(completion, gold, meta)


def sometimes_endless(completion: str, gold: str, meta: dict[str, Any]) -> bool:
    """The same, over the time limit for every first token below 8."""
    while int(completion.split()[0]) < 8:
        pass
    return first_even(completion, gold, meta)
