"""Messages delivered once and in order between two processes, over any number of connections.

ZeroMQ loses what is under way when a connection ends, and what a ROUTER has queued for that peer. A
`Link` numbers its messages, keeps each until the other side has acknowledged it, and sends what is
kept again when the other side asks. It has no socket: frames in, frames out.

    header   kind, sender's session, receiver's session (0: unknown), number, acknowledged number
    payload  of a message; other kinds have none

A conversation is two sessions, one of each side. Only a peer of a `Links` begins one, by a frame to
session 0; what is sent to it earlier waits for that. A frame to or from a session of a conversation
that has ended, or of a process of before, is answered by `_BEGIN`: the peer takes a new session.
Sessions are random, so nothing of one conversation can be taken for a part of another.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections import defaultdict, deque

Frame = tuple[bytes, bytes]  # (header, payload)
_HEADER = struct.Struct("<BQQQQ")
_MESSAGE, _ACKNOWLEDGE, _ASK, _BEGIN = range(4)
UNACKNOWLEDGED = 64  # messages after which the receiver acknowledges before the next `tick`
TICK_SECONDS = 0.25  # time between two calls of `tick`; at most twice that
PING_SECONDS = 2.0  # silence of a side that lives, at most: it repeats its acknowledgement


class FrameError(ValueError):
    """Bytes that are no frame: another program, or another version of this package."""


class Link:
    """One side of one conversation; another conversation is another `Link`."""

    def __init__(self) -> None:
        self.session = secrets.randbits(63) + 1  # number of this side's session
        self.peer = 0  # session of the other side; 0 until a frame of it has come
        self.is_ended = False  # True if the other side wants another conversation
        self._kept: deque[tuple[int, bytes]] = deque()
        self._sent = self._received = self._told = 0
        self._asked = self._is_fresh = False
        self._spoke_at = time.monotonic()

    @property
    def all_delivered(self) -> bool:
        """True if the other side has acknowledged every message."""
        return not self._kept

    def send(self, payload: bytes) -> Frame:
        """Return the frame of a new message."""
        self._sent, self._is_fresh = self._sent + 1, True
        self._kept.append((self._sent, payload))
        return self._frame(_MESSAGE, self._sent, payload)

    def receive(self, header: bytes, payload: bytes) -> tuple[bool, list[Frame]]:
        """Return (True if the payload is the next message, frames to send back)."""
        kind, source, target, number, acknowledged = unpack(header)
        if kind == _BEGIN:
            self.is_ended |= target == self.session
            return False, []
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

    def tick(self, now: float | None = None) -> list[Frame]:
        """Return the frames that are due: an acknowledgement, and the number of the last message.

        By it the other side notices that the last messages were lost, unless they were sent since
        the last tick; by a frame every `PING_SECONDS` at least, that this side lives.
        """
        now = time.monotonic() if now is None else now
        is_late, self._is_fresh, self._asked = not self._is_fresh, False, False
        is_silent = now - self._spoke_at >= PING_SECONDS - 2 * TICK_SECONDS
        if (self._kept and is_late) or self._received > self._told or is_silent:
            return [self._frame(_ACKNOWLEDGE)]
        return []

    def reconnected(self) -> list[Frame]:
        """Return what to send over a new connection: all that may be lost, and a request for it."""
        return [self._frame(_ASK), *self._all_kept()]

    def _all_kept(self) -> list[Frame]:
        return [self._frame(_MESSAGE, number, payload) for number, payload in self._kept]

    def _frame(self, kind: int, number: int | None = None, payload: bytes = b"") -> Frame:
        self._told, self._spoke_at = self._received, time.monotonic()
        number = self._sent if number is None else number
        return _HEADER.pack(kind, self.session, self.peer, number, self._received), payload


class Links:
    """The conversations of a process that has many peers, by their names."""

    def __init__(self) -> None:
        self._links = defaultdict[str, Link](Link)
        self._ended: defaultdict[str, set[int]] = defaultdict(set)

    def send(self, to: str, payload: bytes) -> list[Frame]:
        """Return the frame of a new message; none while the peer has not begun a conversation."""
        link = self._links[to]
        frame = link.send(payload)
        return [frame] if link.peer else []

    def end(self, name: str) -> list[Frame]:
        """End a conversation, drop what is not acknowledged, and return the frame that says so."""
        link = self._links.pop(name, None)
        if link is None or not link.peer:
            return []
        self._ended[name].add(link.peer)
        return [_begin(link.peer)]

    def receive(self, identity: bytes, header: bytes, payload: bytes) -> tuple[bool, list[Frame]]:
        """As `Link.receive`; the first frame of another session of a peer ends its earlier one.

        `identity` is the ROUTER's for the peer: its name. When a new connection of a peer replaces
        its old one, what is left to read from that has an identity that ZeroMQ makes up, with a
        zero byte first. It is dropped: the peer sends it again.
        """
        if identity[:1] == b"\0":
            return False, []
        name, (_, source, target, *_) = identity.decode(), unpack(header)
        link = self._links.get(name)
        if source in self._ended[name] or target not in (0, link.session if link else 0):
            return False, [_begin(source)]
        if link is not None and link.peer not in (0, source):
            self.end(name)
        return self._links[name].receive(header, payload)

    def tick(self, now: float | None = None) -> list[tuple[str, Frame]]:
        """Return (peer, frame) of all that is due."""
        now = time.monotonic() if now is None else now
        links = [(name, link) for name, link in self._links.items() if link.peer]
        return [(name, frame) for name, link in links for frame in link.tick(now)]

    def undelivered(self) -> list[str]:
        """Return the names of the peers that have not acknowledged every message."""
        return [name for name, link in self._links.items() if not link.all_delivered]


def _begin(peer: int) -> Frame:
    """Return the frame by which this session of a peer begins another conversation."""
    return _HEADER.pack(_BEGIN, 0, peer, 0, 0), b""


def unpack(header: bytes) -> tuple[int, int, int, int, int]:
    """Return the fields of a header; `FrameError` for another length."""
    if len(header) != _HEADER.size:
        raise FrameError(
            f"a frame's header has {len(header)} bytes and not {_HEADER.size}: install the same"
            " version of megatron_rl on every rank"
        )
    return _HEADER.unpack(header)
