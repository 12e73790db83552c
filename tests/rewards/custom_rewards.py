"""Custom reward functions for the tests, good and bad."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

from megatron_rl.rewards.base import Outcome, Verdict

NUMBER = 7
_kept: list[bytearray] = []


def sync_reward(completion: str, gold: str, meta: dict[str, Any]) -> bool:
    assert meta == {"key": 1}
    return completion == gold


async def async_reward(completion: str, gold: str, meta: dict[str, Any]) -> bool:
    await asyncio.sleep(0.001)
    return completion == gold


def verdict_reward(completion: str, gold: str, meta: dict[str, Any]) -> Verdict:
    return Verdict(Outcome.CORRECT if completion == gold else Outcome.NO_ANSWER, "by hand")


def raises(completion: str, gold: str, meta: dict[str, Any]) -> bool:
    return bool(meta["nothing"])


def returns_text(completion: str, gold: str, meta: dict[str, Any]) -> Any:
    return "good"


def graded(completion: str, gold: str, meta: dict[str, Any]) -> float | Verdict:
    """Return the number in the completion; `half` is wrong with a reward of 0.5."""
    return Verdict(Outcome.WRONG, "by halves", 0.5) if completion == "half" else float(completion)


def leak(completion: str, gold: str, meta: dict[str, Any]) -> bool:
    _kept.append(bytearray(b"x" * 2**20))
    return True


def greedy(completion: str, gold: str, meta: dict[str, Any]) -> bool:
    raise MemoryError if not bytearray(2**30) else AssertionError


def crash(completion: str, gold: str, meta: dict[str, Any]) -> bool:
    if completion == "boom":
        ctypes.string_at(0)
    return True
