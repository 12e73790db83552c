"""Messages delivered once and in order between two processes, over any number of connections.

ZeroMQ loses what is under way when a connection ends, and what a ROUTER has queued for that peer. A
`Link` numbers its messages, keeps each until the other side has acknowledged it, and sends what is
kept again when the other side asks. It has no socket: frames in, frames out.

    header   kind, sender's session, receiver's session (0: unknown), number, acknowledged number
    payload  of a message; other kinds have none
"""

from __future__ import annotations

import secrets
import struct
from collections import defaultdict, deque

Frame = tuple[bytes, bytes]
"""(header, payload)"""
_HEADER = struct.Struct("<BQQQQ")
_MESSAGE, _ACKNOWLEDGE, _ASK = range(3)
UNACKNOWLEDGED = 64
"""Messages after which the receiver acknowledges at once, and not with the next `tick`."""
TICK_SECONDS = 0.25
"""Time between two calls of `tick`."""


class FrameError(ValueError):
    """Bytes that are no frame: another program, or another version of this package."""


class Link:
    """One side of a conversation with one session of a peer.

    A session is the lifetime of a process: a peer that is started again has another conversation,
    and another `Link`.
    """

    def __init__(self, session: int | None = None, peer: int = 0) -> None:
        self.session = session or secrets.randbits(63) + 1
        """Number of this side's session."""
        self.peer = peer
        """Session of the other side; 0 until a frame of it has come."""
        self._kept: deque[tuple[int, bytes]] = deque()
        self._sent = self._received = self._told = 0
        self._asked = False

    @property
    def all_delivered(self) -> bool:
        """True if the other side has acknowledged every message."""
        return not self._kept

    def send(self, payload: bytes) -> Frame:
        """Return the frame of a new message."""
        self._sent += 1
        self._kept.append((self._sent, payload))
        return self._frame(_MESSAGE, self._sent, payload)

    def receive(self, header: bytes, payload: bytes) -> tuple[bool, list[Frame]]:
        """Return (True if the payload is the next message, frames to send back)."""
        kind, source, target, number, acknowledged = unpack(header)
        if target not in (0, self.session) or (self.peer and source != self.peer):
            return False, []  # of an earlier session
        self.peer = source
        while self._kept and self._kept[0][0] <= acknowledged:
            self._kept.popleft()
        back = self._all_kept() if kind == _ASK else []
        is_next = kind == _MESSAGE and number == self._received + 1
        if is_next:
            self._received, self._asked = number, False
            if self._received - self._told >= UNACKNOWLEDGED:
                back.append(self._frame(_ACKNOWLEDGE))
        elif number > self._received and not self._asked:
            self._asked = True
            back.append(self._frame(_ASK))
        return is_next, back

    def tick(self) -> list[Frame]:
        """Return the frames that are due: an acknowledgement, and the number of the last message.

        By the latter the other side notices that the last messages were lost.
        """
        self._asked = False
        return [self._frame(_ACKNOWLEDGE)] if self._kept or self._received > self._told else []

    def reconnected(self) -> list[Frame]:
        """Return what to send over a new connection: all that may be lost, and a request for it."""
        return [self._frame(_ASK), *self._all_kept()]

    def _all_kept(self) -> list[Frame]:
        return [self._frame(_MESSAGE, number, payload) for number, payload in self._kept]

    def _frame(self, kind: int, number: int | None = None, payload: bytes = b"") -> Frame:
        self._told = self._received
        number = self._sent if number is None else number
        return _HEADER.pack(kind, self.session, self.peer, number, self._received), payload


class Links:
    """The conversations of a process that has many peers, by their names."""

    def __init__(self) -> None:
        self.session = Link().session
        self._links = defaultdict[str, Link](lambda: Link(self.session))
        self._ended: defaultdict[str, set[int]] = defaultdict(set)

    def send(self, to: str, payload: bytes) -> Frame:
        """Return the frame of a new message to a peer, which may not have been heard of yet."""
        return self._links[to].send(payload)

    def receive(self, identity: bytes, header: bytes, payload: bytes) -> tuple[bool, list[Frame]]:
        """Return (True if the payload is the peer's next message, frames to send back).

        `identity` is the ROUTER's for the peer: its name. When a new connection of a peer replaces
        its old one, what is left to read from that has an identity that ZeroMQ makes up, with a
        zero byte first. It is dropped: the peer sends it again.

        The first frame of another session of a peer begins a new conversation with it; messages
        for its earlier session are dropped.
        """
        if identity[:1] == b"\0":
            return False, []
        name = identity.decode()
        link = self._links[name]
        source = unpack(header)[1]
        if link.peer and source != link.peer:
            if source in self._ended[name]:
                return False, []
            self._ended[name].add(link.peer)
            link = self._links[name] = Link(self.session, source)
        return link.receive(header, payload)

    def tick(self) -> list[tuple[str, Frame]]:
        """Return (peer, frame) of all that is due."""
        return [(name, frame) for name, link in self._links.items() for frame in link.tick()]

    def undelivered(self) -> list[str]:
        """Return the names of the peers that have not acknowledged every message."""
        return [name for name, link in self._links.items() if not link.all_delivered]


def unpack(header: bytes) -> tuple[int, int, int, int, int]:
    """Return the fields of a header.

    Raises:
        FrameError: another length.
    """
    if len(header) != _HEADER.size:
        raise FrameError(
            f"a frame's header has {len(header)} bytes and not {_HEADER.size}: install the same"
            " version of megatron_rl on every rank"
        )
    return _HEADER.unpack(header)
