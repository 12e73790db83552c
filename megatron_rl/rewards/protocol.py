"""Frames between a pool and its workers: 4 bytes of length (little endian), then MessagePack."""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec

from megatron_rl.rewards.base import Verdict

HEADER = struct.Struct("<II")
"""Magic number and length. A worker that lost its place in the stream notices at the magic."""
MAGIC = 0x4D52_4C31
MAX_FRAME = 256 * 2**20


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to judge."""

    id: int
    kind: str
    """Task kind: `exact`, `math`, `code`, `reasoning`, `custom`."""
    completion: str
    gold: str
    meta: dict[str, Any]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request."""

    id: int
    status: Literal["ready", "verdict", "died", "down", "bug"]
    """`ready` (a worker started), `verdict`, `died` (killed by `signal`), `down` (the verifier
    cannot work; `reason` has the remedy), `bug` (an exception that nothing foresaw)."""
    verdict: Verdict | None = None
    reason: str = ""
    signal: int = 0


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_responses = msgspec.msgpack.Decoder(Response)


class Garbled(RuntimeError):
    """The bytes are no frame."""


def frame(message: Any) -> bytes:
    """Header and body of a message."""
    body = _encoder.encode(message)
    return HEADER.pack(MAGIC, len(body)) + body


def body_length(header: bytes) -> int:
    """Length of the body that follows.

    Raises:
        Garbled: no header.
    """
    magic, length = HEADER.unpack(header)
    if magic != MAGIC or length > MAX_FRAME:
        raise Garbled("the stream between pool and worker lost its place")
    return int(length)


def read_request(body: bytes) -> Request:
    """The request of a frame's body."""
    return _requests.decode(body)


def read_response(body: bytes) -> Response:
    """The response of a frame's body."""
    return _responses.decode(body)
