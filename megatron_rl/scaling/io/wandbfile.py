"""Offline wandb runs: the history records of a ``run-*.wandb`` file, without the wandb package.

Layout: 7 bytes of header (":W&B", magic, version), then LevelDB log blocks of 32 KiB. A log record
is crc32 (4), length (2), type (1: whole, 2: first, 3: middle, 4: last) and data; a block's last
bytes (under 7) are padding. Data are protobuf ``Record`` messages, of which ``history`` (field 2)
and ``run`` (field 17) are read. A torn end, left by a killed run, ends the reading.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import DataError
from .table import Table

BLOCK = 32768
HISTORY, RUN = 2, 17
ITEM, STEP = 1, 2
KEY, NESTED_KEY, VALUE_JSON = 1, 2, 16
DISPLAY_NAME = 8

Field = tuple[int, int | bytes]


def read(path: Path) -> Table:
    """Read the history of an offline run; `_step` is the default compute."""
    raw = path.read_bytes()
    if raw[:4] != b":W&B":
        raise DataError(
            "not a wandb run file (header)", "Give run-*.wandb of an offline run", file=str(path)
        )
    rows: list[dict[str, object]] = []
    name = path.parent.name
    for record in _records(raw, str(path)):
        for number, value in _fields(record):
            if number == HISTORY and isinstance(value, bytes):
                rows.append(_history(value))
            elif number == RUN and isinstance(value, bytes):
                names = [v for n, v in _fields(value) if n == DISPLAY_NAME]
                if names and isinstance(names[-1], bytes) and names[-1]:
                    name = names[-1].decode()
    if not rows:
        raise DataError(
            "the run has no history", "Log something, and wait until it is written", file=str(path)
        )
    keys = list(dict.fromkeys(key for row in rows for key in row))
    columns: dict[str, list[object]] = {key: [row.get(key) for row in rows] for key in keys}
    return Table(str(path), name, columns, list(range(1, len(rows) + 1)))


def _history(message: bytes) -> dict[str, object]:
    """One logged row: keys (nested ones joined by a dot) to values."""
    row: dict[str, object] = {}
    for number, value in _fields(message):
        if number == STEP and isinstance(value, bytes):
            row["_step"] = next((v for n, v in _fields(value) if n == 1), 0)
        if number != ITEM or not isinstance(value, bytes):
            continue
        item = list(_fields(value))
        key = [v.decode() for n, v in item if n in (KEY, NESTED_KEY) and isinstance(v, bytes)]
        text = [v for n, v in item if n == VALUE_JSON and isinstance(v, bytes)]
        if key and text:
            row[".".join(k for k in key if k)] = json.loads(text[-1])
    return row


def _records(raw: bytes, source: str) -> Iterator[bytes]:
    """Whole records; a record that reaches beyond the end of the file was torn and is dropped."""
    at, parts = 7, b""
    while at + 7 <= len(raw):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        crc, length, kind = struct.unpack_from("<IHB", raw, at)
        if kind == 0:
            return
        data = raw[at + 7 : at + 7 + length]
        if len(data) < length:
            return
        if zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
            raise DataError(
                f"checksum of the record at byte {at} does not match", "Copy it again", file=source
            )
        at += 7 + length
        parts = data if kind in (1, 2) else parts + data
        if kind in (1, 4):
            yield parts


def _fields(message: bytes) -> Iterator[Field]:
    """Fields of a protobuf message: numbers, and bytes for strings and messages."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
        elif wire == 2:
            size, at = _varint(message, at)
            yield number, message[at : at + size]
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise DataError(f"protobuf wire type {wire} is unknown", "Update megatron_rl")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
