"""A generator's conversations with the orchestrators of a run, one after the other."""

import asyncio
import time
from pathlib import Path

from megatron_rl import messages as m
from megatron_rl.orchestrator_connection import OrchestratorConnection

_CHECK_SECONDS = 1.0


class OrchestratorGoneError(ConnectionError):
    """There was no orchestrator for too long."""


class Conversations(OrchestratorConnection):
    """Sends and receives in the newest conversation; make and use it in a running event loop.

    `join` is the first message of every one. What is sent before `begin` belongs to an old one and
    is dropped.
    """

    def __init__(self, endpoint: str | Path, name: str, join: m.Join) -> None:
        self._given, self._join = endpoint, join
        self._loop, self._inbox = asyncio.get_running_loop(), asyncio.Queue[bytes | int]()
        self._newest = self._served = 0
        self._unwelcome_since: float | None = None
        super().__init__(endpoint, name, self._put, self._renew)

    def _put(self, item: bytes | int) -> None:
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, item)

    def _renew(self) -> None:
        # In the connection's thread, which drops what is sent from here on until `begin`.
        self._newest += 1
        self._put(self._newest)

    def begin(self) -> None:
        """Send the first message of a conversation; the answer is `Welcome`."""
        self._unwelcome_since = time.monotonic()
        if self._served == self._newest:  # else there is another one to begin
            self.send(self._join)

    def welcome(self) -> None:
        """Note that the answer has come."""
        self._unwelcome_since = None

    async def next(self) -> m.AnyMessage | None:
        """Return the next message; None: another conversation has begun, which `begin` opens.

        Raises:
            OrchestratorGoneError: the connection's thread has ended.
        """
        while True:
            try:
                item = await asyncio.wait_for(self._inbox.get(), _CHECK_SECONDS)
            except TimeoutError:
                if (error := self.error) is not None:
                    raise OrchestratorGoneError(f"the connection ended: {error}") from error
                continue
            if isinstance(item, bytes):
                return m.decode(item)
            self._served = item
            return None

    @property
    def is_open(self) -> bool:
        """True while the newest conversation is served over a connection."""
        return self._served == self._newest and self.disconnected_since is None

    def check(self, seconds: float, key: str) -> None:
        """Raise OrchestratorGoneError if there was no orchestrator for so long (`timeouts.key`)."""
        since = [self.disconnected_since, self._unwelcome_since]
        alone = [time.monotonic() - moment for moment in since if moment is not None]
        if alone and max(alone) > seconds:
            raise OrchestratorGoneError(
                f"no orchestrator at {self._given} for {seconds:g} s (timeouts.{key}): it ended"
                " without sending Stop; its own log has the cause"
            )
