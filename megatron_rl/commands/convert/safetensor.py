"""safetensors files read and written piece by piece, with no more memory than the piece.

Layout of a file: 8 bytes little-endian header length, the header (JSON: `{"name": {"dtype",
"shape", "data_offsets": [start, end]}, "__metadata__": {...}}`, padded with spaces), the data.
Files are read with pread rather than mapped, so that resident memory is what a piece needs and not
what was ever touched. Written files are byte for byte those of `safetensors.torch.save_file`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from megatron_rl.commands.convert.errors import ConvertError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COPY_BYTES = 32 * 2**20
"""Bytes of an untouched tensor that are moved at a time."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
"""Number formats by their name in a header, in the library's order."""
_RANK = {name: i for i, name in enumerate(DTYPES)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor is, and what.

    Example: `Entry("BF16", (128256, 4096), Path("model-00001-of-00004.safetensors"), 9000)`.
    """

    dtype: str
    """Name in the header."""
    shape: tuple[int, ...]
    path: Path
    start: int
    """Offset of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file.

    Raises:
        ConvertError: not a safetensors file, a number format that is unknown, or a file that is
            shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            header = json.loads(file.read(length)) if 0 < length <= size - 8 else None
    except (ValueError, UnicodeDecodeError):
        header = None
    if not isinstance(header, dict):
        raise ConvertError(f"{path}: not a safetensors file, or a torn one: fetch it again")
    found: dict[str, Entry] = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        if about["dtype"] not in DTYPES:
            raise ConvertError(
                f"{path}: {name} has number format {about['dtype']}: known are {', '.join(DTYPES)}"
            )
        begin, end = about["data_offsets"]
        found[name] = Entry(about["dtype"], tuple(about["shape"]), path, 8 + length + begin)
        if 8 + length + end > size or end - begin != found[name].num_bytes:
            raise ConvertError(
                f"{path}: {name} ends at byte {8 + length + end} of {size}: the file is truncated"
                " or torn; fetch it again"
            )
    return found


class Source:
    """The tensors of a directory's safetensors files, by name.

    Args:
        directory: with `model.safetensors`, or `model.safetensors.index.json` and its files.
        pattern: read the files of this glob pattern instead, without an index.

    Raises:
        ConvertError: no such file, or an index and files that differ.
    """

    def __init__(self, directory: Path, pattern: str | None = None) -> None:
        self.directory = directory
        index = directory / INDEX
        weight_map: dict[str, str] | None = None
        if pattern is not None:
            files = sorted(path.name for path in directory.glob(pattern))
        elif index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
        else:
            files = [SINGLE]
        self.files = [directory / name for name in files]
        self.entries: dict[str, Entry] = {}
        for path in self.files:
            if not path.is_file():
                raise ConvertError(f"{path}: missing; the checkpoint is incomplete")
            self.entries |= read_header(path)
        if weight_map is not None and weight_map.keys() != self.entries.keys():
            differ = sorted(weight_map.keys() ^ self.entries.keys())
            raise ConvertError(f"{index}: names differ from those in its files: {differ[:5]}")

    def read(
        self, name: str, index: int | None = None, rows: tuple[int, int] | None = None
    ) -> Tensor:
        """One tensor, entry `index` of its first dimension, or the rows [start, stop) of that."""
        entry = self.entries[name]
        shape, start = entry.shape, entry.start
        itemsize = DTYPES[entry.dtype].itemsize
        if index is not None:
            shape = shape[1:]
            start += index * math.prod(shape) * itemsize
        if rows is not None:
            start += rows[0] * math.prod(shape[1:]) * itemsize
            shape = (rows[1] - rows[0], *shape[1:])
        data = _pread(entry.path, start, math.prod(shape) * itemsize)
        return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(shape)

    def blocks(self, name: str) -> Iterator[tuple[int, bytearray]]:
        """(offset in the tensor, bytes) of a whole tensor."""
        entry = self.entries[name]
        for offset in range(0, entry.num_bytes, COPY_BYTES):
            size = min(COPY_BYTES, entry.num_bytes - offset)
            yield offset, _pread(entry.path, entry.start + offset, size)


def _pread(path: Path, start: int, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    with path.open("rb", buffering=0) as file:
        while done < size:
            got = os.preadv(file.fileno(), [view[done:]], start + done)
            if got == 0:
                raise ConvertError(f"{path}: ended at byte {start + done}: it changed meanwhile")
            done += got
    return data


class Writer:
    """A safetensors file whose tensors are written in pieces, in any order.

    Args:
        path: replaced when it exists.
        tensors: (number format, shape) by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.path = path
        # The order of the safetensors library: wide formats first, so that all are aligned.
        order = sorted(tensors, key=lambda n: (-_RANK[tensors[n][0]], n))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._sizes: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        end = 0
        for name in order:
            dtype, shape = tensors[name]
            self._sizes[name] = math.prod(shape) * DTYPES[dtype].itemsize
            self._starts[name] = end
            offsets = [end, end := end + self._sizes[name]]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self._left = dict(self._sizes)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with self._file:
            missing = [name for name, left in self._left.items() if left]
            if missing and kind is None:
                raise RuntimeError(f"{self.path}: not written in full: {missing[:5]}")
            self._file.flush()
            os.fsync(self._file.fileno())

    def write(self, name: str, piece: Tensor | bytearray, offset: int = 0) -> None:
        """Writes a piece of a tensor, `offset` bytes from its start."""
        if isinstance(piece, Tensor):
            flat = piece.contiguous().flatten()
            data = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
        else:
            data = memoryview(piece)
        if offset + data.nbytes > self._sizes[name]:
            raise RuntimeError(f"{self.path}: {name} has no byte {offset + data.nbytes}")
        self._left[name] -= data.nbytes
        self._file.seek(self._data + self._starts[name] + offset)
        self._file.write(data)


def shard_names(
    sizes: Mapping[str, int], max_bytes: int, stem: str = "model"
) -> dict[str, list[str]]:
    """Which tensors go into which file, as Hugging Face divides a model.

    Tensors keep their order; a file is closed before the tensor that would take it beyond
    `max_bytes`. A tensor that is larger has a file of its own, which comes before the file that is
    being filled.

    Returns:
        File name -> names. One file alone is `model.safetensors`.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > max_bytes:
            shards.append([name])
            continue
        if filled + size > max_bytes:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    if current:
        shards.append(current)
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    width = len(shards)
    return {f"{stem}-{i:05d}-of-{width:05d}.safetensors": s for i, s in enumerate(shards, start=1)}
