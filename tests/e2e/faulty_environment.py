"""The lookups of the tools example, by an environment that fails now and then in each way."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from typing import Any

from megatron_rl.rewards.verifier_settings import SandboxSettings
from megatron_rl.rollouts.environments import Opening, Step
from megatron_rl.rollouts.tool_environment import ToolEnvironment

EPISODES = itertools.count()
DEATH = 25
"""Number of the episode in which a worker is killed."""


def fails_always(question: str) -> bool:
    """Return True for a tenth of the questions `2;4733?`."""
    return question.rstrip("?").endswith("7")


class FaultyLookups:
    """Every tenth episode of a worker raises, every tenth floods, and the sixth hangs."""

    def __init__(self) -> None:
        sandbox = SandboxSettings().model_dump(mode="json")
        self._tools = ToolEnvironment(["megatron_rl.data.lookup:lookup"], sandbox, 64)
        self._number = next(EPISODES)

    def reset(self, row: dict[str, Any]) -> Opening:
        """Begin, unless the question fails always."""
        if fails_always(row["messages"][-1]["content"]):
            raise RuntimeError("the service of this question is down")
        return self._tools.reset(row)

    async def step(self, message: dict[str, Any]) -> Step:
        """Answer the calls of a turn, or fail."""
        if self._number == DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        match self._number % 10:
            case 3:
                raise ConnectionError("the service is down")
            case 5 if self._number == 5:
                await asyncio.sleep(3600)
            case 8:
                return Step(messages=[{"role": "user", "content": "1" * 10**6}])
        return await self._tools.step(message)
