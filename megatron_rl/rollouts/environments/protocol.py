"""The protocol of an environment, and the messages between its process and the generator's."""

import asyncio
from collections.abc import Awaitable
from typing import Any, Literal, Protocol

import msgspec


class Opening(msgspec.Struct, kw_only=True):
    """The beginning of an episode: `Opening(messages=[{"role": "user", "content": "Hi"}])`."""

    messages: list[dict[str, Any]]
    """Messages before the policy's first turn, in the form of OpenAI's chat interface."""
    tools: list[dict[str, Any]] = []
    """Schemas of the tools that the environment answers, in that form too."""


class Step(msgspec.Struct, kw_only=True):
    """An environment's answer to a turn of the policy."""

    messages: list[dict[str, Any]] = []
    """Messages before the policy's next turn: results of tools, a user's turn, ..."""
    reward: float | None = None
    """Reward of the turn that this answers; None: it has none of its own."""
    done: bool = False  # True if the episode has ended
    reason: str = ""  # why it ended, or what the reward is for; for a person to read


class Environment(Protocol):
    """One episode; an object is made for each, with the options of the task.

    Either method may be a coroutine function; one that is not runs in a thread, of which each
    episode has one. `close()` is optional; it is called at the end, after the last call, unless
    that never ends or the process dies. What is raised fails the episode: it is made again and
    never becomes a reward.
    """

    def reset(self, row: dict[str, Any]) -> Opening | Awaitable[Opening]:
        """Begin the episode of a row of the task: `messages`, `gold`, `meta` and its own fields."""

    def step(self, message: dict[str, Any]) -> Step | Awaitable[Step]:
        """Answer a message of the policy: `role`, `content`, and `tool_calls` if it made any."""


class Start(msgspec.Struct, frozen=True):
    """The start of a worker process."""

    path: str
    options: dict[str, Any]
    seconds: float  # longest time of a call
    characters: int  # longest message that an environment may give


class Request(msgspec.Struct, frozen=True):
    """A call of an episode's environment."""

    episode: int
    call: Literal["reset", "step", "close"]
    argument: dict[str, Any] = {}


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request, or to the start (`episode` 0)."""

    episode: int
    opening: Opening | None = None
    step: Step | None = None
    cause: str = ""  # of a failure, as in `RolloutError`
    text: str = ""
    stuck: bool = False
    """True if the call goes on although it was cancelled: its process has to end some day."""


def frame(message: Start | Request | CallResult) -> bytes:
    """Return the bytes of a message: its length (4 bytes, little endian) and its MessagePack."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


async def receive(stream: asyncio.StreamReader) -> bytes:
    """Return the MessagePack of the next message.

    Raises:
        asyncio.IncompleteReadError: the connection was closed.
        OSError: the connection broke.
    """
    length = int.from_bytes(await stream.readexactly(4), "little")
    return await stream.readexactly(length)
