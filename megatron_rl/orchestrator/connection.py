"""The orchestrator's socket as one queue of events and an outbox."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self

import zmq
from zmq.asyncio import Socket

from megatron_rl import messages as m
from megatron_rl.orchestrator import RunError

Event = Callable[[], None]


class Connection:
    """Reads a bound ROUTER socket; each message is an event `handle(sender, message)`."""

    def __init__(self, socket: Socket, handle: Callable[[str, m.Message], None]) -> None:
        self._socket, self._handle = socket, handle
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._outbox: list[tuple[str, m.Message]] = []

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._reader_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def post(self, event: Event) -> None:
        """Append an event to the queue."""
        self._events.put_nowait(event)

    async def next_event(self, seconds: float) -> Event | None:
        """Return the next event, or None after so many seconds without one."""
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._events.get(), seconds)
        return None

    def send(self, to: str, message: m.Message) -> None:
        """Append a message to the outbox."""
        self._outbox.append((to, message))

    async def flush(self) -> None:
        """Send the messages of the outbox.

        Raises:
            RunError: the receiver is gone.
        """
        outbox, self._outbox = self._outbox, []
        for to, message in outbox:
            try:
                await self._socket.send_multipart([to.encode(), m.encode(message)])
            except zmq.ZMQError as e:
                raise RunError(f"{to} is gone ({e}): see its log") from e

    async def _read(self) -> None:
        while True:
            identity, data = await self._socket.recv_multipart()
            self.post(partial(self._handle, identity.decode(), m.decode(data)))

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            self.post(reader.result)  # raises the reader's error inside the event loop
