"""Environments for the tests, good and bad: each does what the policy's message says."""

import asyncio
import os
import re
import subprocess
import sys
import time
from typing import Any

from megatron_rl.rollouts.environments import Opening, Step

ORPHAN = "1000.125"
"""Seconds of a child, by which it is found."""
TOOL = {"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}


class Guess:
    """Guess the gold number: a reward of 1.0 divided by the number of guesses, in plain code."""

    def __init__(self, floor: int = 0, log: str = "") -> None:
        self.floor, self.log, self.guesses = floor, log, 0

    def reset(self, row: dict[str, Any]) -> Opening:
        self.gold = int(row["gold"])
        messages = [*row["messages"], {"role": "user", "content": f"It is above {self.floor}."}]
        return Opening(messages=messages, tools=[TOOL])

    def step(self, message: dict[str, Any]) -> Step:
        self.guesses += 1
        act(message["content"])
        guess = int(message["content"])
        if guess == self.gold:
            return Step(reward=1.0 / self.guesses, done=True, reason="found")
        hint = "more" if guess < self.gold else "less"
        return Step(messages=[{"role": "user", "content": hint}])

    def close(self) -> None:
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{self.gold}\n")


class AsyncGuess(Guess):
    """The same in coroutines."""

    async def reset(self, row: dict[str, Any]) -> Opening:  # type: ignore[override]
        await asyncio.sleep(0)
        if row["gold"] == "wait":
            await asyncio.sleep(1000)
        return Guess.reset(self, row)

    async def step(self, message: dict[str, Any]) -> Step:  # type: ignore[override]
        if message["content"] == "wait":
            await asyncio.sleep(1000)
        if message["content"] == "will not end":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    continue
        return Guess.step(self, message)


def act(word: str) -> None:
    """Do what environments should not."""
    if word == "raise":
        raise ZeroDivisionError("no guess")
    if word == "nap":
        time.sleep(0.5)
    if word == "sleep":
        time.sleep(1000)
    if word == "spin":  # inside one C call, which no other thread can interrupt
        re.match(r"(a+)+$", "a" * 60 + "b")
    if word == "exit":
        os._exit(3)
    if word == "leave a child":  # which holds what it inherits
        subprocess.Popen(["sleep", ORPHAN], close_fds=False)
        os._exit(3)
    if word == "print":
        sys.stdout.write("x" * 2**22)
        sys.stderr.write("x" * 2**22)
        sys.stdout.flush()


class Flood(Guess):
    """It says as much as the policy asks for."""

    def step(self, message: dict[str, Any]) -> Step:
        return Step(messages=[{"role": "user", "content": "x" * int(message["content"])}])


class Wrong(Guess):
    """It returns what the protocol does not have."""

    def step(self, message: dict[str, Any]) -> Step:
        if message["content"] == "surrogate":
            return Step(messages=[{"role": "user", "content": "\ud800"}])
        if message["content"] == "type":
            return "done"  # type: ignore[return-value]
        return Step(reward="much", done=True)  # type: ignore[arg-type]
