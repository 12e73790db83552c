"""The orchestrator's wire: all that happens as one queue of events, and an outbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self

import zmq.asyncio

from megatron_rl import messages as m

Event = Callable[[], None]


class Wire:
    """`async with Wire(socket, handle) as wire:` reads the socket into the queue.

    Args:
        socket: bound ROUTER socket.
        handle: what a message means, `handle(sender, message)`; it is called as an event.
    """

    def __init__(
        self, socket: zmq.asyncio.Socket, handle: Callable[[str, m.Message], None]
    ) -> None:
        self._socket, self._handle = socket, handle
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._outbox: list[tuple[str, m.Message]] = []
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._reader is not None
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def post(self, event: Event) -> None:
        """Have this called by the event loop, in its turn."""
        self._events.put_nowait(event)

    async def next_event(self, seconds: float) -> Event | None:
        """The next event, None if there is none for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._events.get()
        return None

    def send(self, to: str, message: m.Message) -> None:
        """Put a message into the outbox."""
        self._outbox.append((to, message))

    async def flush(self) -> None:
        """Send what is in the outbox."""
        outbox, self._outbox = self._outbox, []
        for to, message in outbox:
            await self._socket.send_multipart([to.encode(), m.encode(message)])

    async def _read(self) -> None:
        while True:
            identity, data = await self._socket.recv_multipart()
            self.post(partial(self._handle, identity.decode(), m.decode(data)))

    def _ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            self.post(reader.result)  # raises what ended it, where it is noticed
