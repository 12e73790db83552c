"""The orchestrator's socket as one queue of events and an outbox.

Messages arrive once and in order (`delivery`); a peer that is away gets its messages when it is
back, and whether it is lost is decided by its silence.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Self

import zmq
from zmq.asyncio import Socket

from megatron_rl import messages as m
from megatron_rl.delivery import TICK_SECONDS, Frame, Links

Event = Callable[[], None]


class Connection:
    """Reads a bound ROUTER socket; each message is an event `handle(sender, message)`."""

    def __init__(self, socket: Socket, handle: Callable[[str, m.Message], None]) -> None:
        self._socket, self._handle = socket, handle
        # A peer's new connection replaces its old one, which may not be known to be dead yet.
        socket.router_mandatory = socket.router_handover = 1
        self._links, self._next_tick = Links(), 0.0
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._outbox: list[tuple[str, Frame]] = []

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
        self._outbox.append((to, self._links.send(to, m.encode(message))))

    async def flush(self) -> None:
        """Send the outbox, and what is due to all peers."""
        if (now := time.monotonic()) >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._outbox += self._links.tick()
        outbox, self._outbox = self._outbox, []
        for to, frame in outbox:
            try:
                await self._socket.send_multipart([to.encode(), *frame])
            except zmq.ZMQError as e:
                if e.errno != zmq.EHOSTUNREACH:  # it is away
                    raise

    async def finish(self, peers: Collection[str], seconds: float) -> None:
        """Wait until these peers have acknowledged every message, for so long at most.

        What they send meanwhile is acknowledged and dropped. Not while events are read.
        """
        deadline = time.monotonic() + seconds
        while True:
            await self.flush()
            if time.monotonic() >= deadline or not set(peers) & set(self._links.undelivered()):
                return
            if await self._socket.poll(int(1000 * TICK_SECONDS)):
                await self._receive()

    async def _read(self) -> None:
        while True:
            self.post(await self._receive())

    async def _receive(self) -> Event:
        identity, header, payload = await self._socket.recv_multipart()
        is_message, back = self._links.receive(identity, header, payload)
        self._outbox += [(identity.decode(), frame) for frame in back]
        if not is_message:
            return _nothing
        return partial(self._handle, identity.decode(), m.decode(payload))

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            self.post(reader.result)  # raises the reader's error inside the event loop


def _nothing() -> None:
    """Let the event loop send what is in the outbox."""
