"""What goes where in a Megatron checkpoint that is made of a Hugging Face directory.

The tensors are divided into pieces that are converted one at a time, and the pieces into parts, a
file each. All of it follows from the headers and config.json: nothing is read yet.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_rl.commands.convert.errors import ConvertError
from megatron_rl.commands.convert.keys import extra_states, place, stacked_layers
from megatron_rl.commands.convert.safetensor import DTYPES, Source, shard_names
from megatron_rl.models import architecture
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Same, Weight

PIECE_BYTES = 32 * 2**20
"""Largest piece of a tensor that is made of one Hugging Face tensor as it is."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is converted, and how; the same in every worker."""

    source: Path
    target: Path
    part_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a parameter, as they are stored."""

    weight: Weight
    rows: tuple[int, int]
    dtype: torch.dtype
    item: WriteItem

    @property
    def num_bytes(self) -> int:
        assert self.item.tensor_data is not None
        return math.prod(self.item.tensor_data.chunk.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Plan:
    source: Source
    architecture: Architecture
    metadata: Metadata
    aliases: dict[str, str]
    """Second name of a tensor -> the one that it is stored under."""
    objects: list[str]
    parts: list[list[Piece]]
    untouched: dict[str, list[str]]
    """File -> names of the tensors that Megatron does not hold."""


@functools.lru_cache(maxsize=1)
def make_plan(made: Job) -> Plan:
    """What goes where; cheap, made anew by every process."""
    config = made.source / "config.json"
    if not config.is_file():
        raise ConvertError(f"{config}: missing; a Hugging Face model directory has one")
    arch = architecture(json.loads(config.read_text()))
    source = Source(made.source)
    untouched = _check_names(source, arch)
    stacked = stacked_layers(arch)
    described: dict[str, Any] = {}
    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    aliases: dict[str, str] = {}
    objects: dict[str, None] = {}
    pieces: list[Piece] = []
    for weight in arch.weights():
        if not weight.exported:  # tied: Megatron stores the embedding once
            continue
        spot = place(arch, weight, stacked)
        key, dtype = spot.keys[0], _dtype(source, weight)
        aliases |= dict.fromkeys(spot.keys[1:], key)
        objects |= dict.fromkeys(extra_states(spot))
        size = torch.Size((*spot.lead, *weight.shape))
        about = described.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=dtype), size, [])
        )
        if about.properties.dtype != dtype:
            raise ConvertError(
                f"{made.source}: {', '.join(weight.hf)} is {dtype} and the same parameter of other"
                f" layers {about.properties.dtype}: Megatron stores them as one tensor"
            )
        for rows in _ranges(weight, dtype):
            rest = weight.shape[1:]
            chunk = ChunkStorageMetadata(
                torch.Size((*spot.at, rows[0], *(0 for _ in rest))),
                torch.Size((*(1 for _ in spot.at), rows[1] - rows[0], *rest)),
            )
            index = MetadataIndex(key, chunk.offsets, len(chunks.setdefault(key, [])))
            chunks[key].append(chunk)
            data = TensorWriteData(chunk, about.properties, size)
            item = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
            pieces.append(Piece(weight, rows, dtype, item))
    for key, found in chunks.items():
        described[key] = replace(described[key], chunks=found)
    described |= {alias: described[key] for alias, key in aliases.items()}
    described |= dict.fromkeys(objects, BytesStorageMetadata())
    sizes = {name: source.entries[name].num_bytes for name in untouched}
    files = shard_names(sizes, made.part_bytes, "untouched") if sizes else {}
    return Plan(
        *(source, arch, Metadata(described), aliases, list(objects)),
        *(_parts(pieces, made.part_bytes), files),
    )


def _check_names(source: Source, arch: Architecture) -> list[str]:
    """Names that are carried through untouched.

    Raises:
        ConvertError: names or shapes that are not those of config.json.
    """
    untouched = list(arch.passthrough(source.entries))
    wanted, there = arch.shapes(), source.entries.keys() - set(untouched)
    missing, unknown = sorted(wanted.keys() - there), sorted(there - wanted.keys())
    if missing or unknown:
        raise ConvertError(
            f"{source.directory} does not hold the tensors of its config.json: missing"
            f" {missing[:5]}, unknown {unknown[:5]}"
        )
    for name, shape in wanted.items():
        if source.entries[name].shape != shape:
            raise ConvertError(
                f"{source.entries[name].path}: {name} is {list(source.entries[name].shape)} and"
                f" config.json makes it {list(shape)}"
            )
    return untouched


def _dtype(source: Source, weight: Weight) -> torch.dtype:
    found = {source.entries[name].dtype for name in weight.hf}
    if len(found) > 1:
        raise ConvertError(
            f"{source.directory}: {', '.join(weight.hf)} have number formats"
            f" {', '.join(sorted(found))}: they make up one parameter of Megatron and must agree"
        )
    return DTYPES[found.pop()]


def _ranges(weight: Weight, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Ranges of rows that are converted at a time."""
    rows = weight.shape[0]
    step = rows
    if isinstance(weight.pack, Same):
        row_bytes = weight.elements // rows * dtype.itemsize
        step = max(1, min(rows, PIECE_BYTES // row_bytes))
    return [(r, min(r + step, rows)) for r in range(0, rows, step)]


def _parts(pieces: list[Piece], part_bytes: int) -> list[list[Piece]]:
    parts: list[list[Piece]] = [[]]
    filled = 0
    for piece in pieces:
        if filled and filled + piece.num_bytes > part_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(piece)
        filled += piece.num_bytes
    return parts
