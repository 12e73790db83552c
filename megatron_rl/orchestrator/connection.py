"""The orchestrator's socket as one queue of events and an outbox.

Messages arrive once and in order (`delivery`); a peer that is away gets its messages when it is
back. Whether it is lost, is decided by its silence and by its connection (`heard`, `closed`), and
`end` tells it so.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import NoReturn, Self

import zmq
from zmq.asyncio import Socket

from megatron_rl import messages as m
from megatron_rl.delivery import TICK_SECONDS, Frame, Links

Event = Callable[[], None]
_GAP_SECONDS = 1.0  # longest pause of the reader that counts as silence of the peers
# Frames that are read at once, and events that wait: what is more stays in the socket, which takes
# the peers in turn. So none seems silent because others have sent much.
_FRAMES_AT_ONCE = _MOST_WAITING = 200
_FINISH_SECONDS = 0.02  # time between two looks at what the peers have acknowledged


class Connection:
    """Reads a bound ROUTER socket; each message is an event `handle(sender, message)`."""

    def __init__(self, socket: Socket, handle: Callable[[str, m.Message], None]) -> None:
        # Not through zmq.asyncio: its futures cost more than all else that is done with a frame.
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._handle = handle
        self.heard: dict[str, float] = {}
        """`time.monotonic()` of each peer's last frame. Time in which this process did not read,
        because it was stopped or busy, is added to it: it is no silence of the peers."""
        self.closed: dict[str, float] = {}
        """Since when there is no connection to a peer, in the same time; noticed by the frames that
        are sent at least every `delivery.PING_SECONDS`."""
        # A peer's new connection replaces its old one, which may not be known to be dead yet.
        socket.router_mandatory = socket.router_handover = 1
        self._links, self._next_tick = Links(), 0.0
        self._ends: Counter[str] = Counter()
        self._runs_at = time.monotonic()
        self._events, self._has_events = deque[Event](), asyncio.Event()
        self._outbox: list[tuple[str, Frame]] = []

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._socket.FD, self._read)
        self._clock = asyncio.create_task(self._note_that_it_runs())
        self._read()
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.FD)
        self._clock.cancel()
        await asyncio.gather(self._clock, return_exceptions=True)

    def post(self, event: Event) -> None:
        """Append an event to the queue."""
        self._events.append(event)
        self._has_events.set()

    async def next_event(self, seconds: float) -> Event | None:
        """Return the next event, or None after so many seconds without one."""
        if self._events:
            await asyncio.sleep(0)  # the others' turn
        else:
            self._has_events.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_events.wait(), seconds)
        self._excuse()
        return self.waiting_event()

    def waiting_event(self) -> Event | None:
        """Return an event that has come already, or None."""
        return self._events.popleft() if self._events else None

    def send(self, to: str, message: m.Message) -> None:
        """Append a message to the outbox; it waits for a peer that has yet to be heard of."""
        self._put(to, self._links.send(to, m.encode(message)))

    def end(self, name: str) -> None:
        """End the conversation with a peer, which begins another one if it lives.

        What either side sent and the other has not handled yet is dropped. A peer that begins
        another conversation by itself, with a second `Join`, has ended the earlier one.
        """
        self._ends[name] += 1
        self._put(name, self._links.end(name))

    async def flush(self) -> None:
        """Send the outbox, and what is due to all peers; read what has come from them."""
        if (now := time.monotonic()) >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._outbox += self._links.tick()
        outbox, self._outbox = self._outbox, []
        for to, frame in outbox:
            try:
                is_short = len(frame[1]) < zmq.COPY_THRESHOLD
                self._socket.send_multipart([to.encode(), *frame], zmq.DONTWAIT, copy=is_short)
            except zmq.ZMQError as e:
                if e.errno != zmq.EHOSTUNREACH:
                    raise
                self.closed.setdefault(to, time.monotonic())
        self._read()  # sending may have taken the signal by which the reader wakes

    async def finish(self, peers: Collection[str], seconds: float) -> None:
        """Wait until these peers have acknowledged every message, for so long at most.

        What they send meanwhile is acknowledged and dropped. Not while events are read.
        """
        deadline = time.monotonic() + seconds
        while True:
            await self.flush()
            self._events.clear()
            if time.monotonic() >= deadline or not set(peers) & set(self._links.undelivered()):
                return
            await asyncio.sleep(_FINISH_SECONDS)

    def _read(self) -> None:
        """Take what has come; an error is raised inside the event loop."""
        try:
            for _ in range(_FRAMES_AT_ONCE):
                if len(self._events) >= _MOST_WAITING:
                    return  # `flush` goes on
                self._take(*self._socket.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            return
        except Exception as e:  # noqa: BLE001 - a frame of another program or version
            self.post(partial(_raise, e))
            return
        # ZeroMQ tells only once that there is something to read.
        asyncio.get_running_loop().call_soon(self._read)

    async def _note_that_it_runs(self) -> None:
        while True:
            self._excuse()
            self._runs_at = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)

    def _take(self, identity: bytes, header: bytes, payload: bytes) -> None:
        is_message, back = self._links.receive(identity, header, payload)
        if identity[:1] == b"\0":
            return
        name = identity.decode()
        self.heard[name] = time.monotonic()
        self.closed.pop(name, None)
        self._put(name, back)
        if is_message:
            self.post(partial(self._deliver, name, self._ends[name], m.decode(payload)))
        elif back:
            self.post(lambda: None)  # the event loop sends what is in the outbox

    def _deliver(self, name: str, ends: int, message: m.Message) -> None:
        if self._ends[name] == ends:
            self._handle(name, message)

    def _put(self, to: str, frames: list[Frame]) -> None:
        self._outbox += [(to, frame) for frame in frames]

    def _excuse(self) -> None:
        """Add a pause of the reader to the times of the peers."""
        now = time.monotonic()
        if (gap := now - self._runs_at) > _GAP_SECONDS:
            for times in (self.heard, self.closed):
                times.update({name: min(now, at + gap) for name, at in times.items()})
            self._runs_at = now


def _raise(error: Exception) -> NoReturn:
    raise error
