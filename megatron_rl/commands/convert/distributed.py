"""Tensors of a Megatron distributed checkpoint (torch_dist), read by byte ranges.

The format is that of `torch.distributed.checkpoint`: `.metadata` says which rectangle of which
tensor is at which bytes of which `*.distcp` file. Any layout can have written it.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl.commands.convert.errors import ConvertError
from megatron_rl.commands.convert.keys import Place, place
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import VocabularyRows, Weight

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def locate(directory: Path) -> Path:
    """The folder with `.metadata` of a checkpoint directory.

    Taken are that folder itself, a directory of a Megatron pretraining script (with its
    `latest_checkpointed_iteration.txt`), and one of this package's training runs.

    Raises:
        ConvertError: none of them.
    """
    tracker = directory / TRACKER
    found = directory
    if tracker.is_file():
        said = tracker.read_text().strip()
        found = directory / (said if said == RELEASE else f"iter_{int(said):07d}")
    elif (directory / "trainer.json").is_file():
        found = directory / "model"
    if not (found / ".metadata").is_file():
        raise ConvertError(
            f"{found}: no .metadata in it: it is no Megatron distributed checkpoint (torch_dist),"
            " or its save did not end"
        )
    return found


class Checkpoint:
    """A distributed checkpoint's tensors, read piece by piece.

    Args:
        directory: see `locate`.
        architecture: the model that it holds.

    Raises:
        ConvertError: no checkpoint, one of another format, or one without a parameter of the model.
    """

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self.folder = locate(directory)
        self.architecture = architecture
        self._reader = FileSystemReader(self.folder)
        config = self.folder / "metadata.json"
        backend = json.loads(config.read_text())["sharded_backend"] if config.is_file() else None
        if backend != "torch_dist":
            raise ConvertError(
                f"{config}: sharded_backend is {backend!r}: this program reads 'torch_dist'"
            )
        try:
            self._metadata: Metadata = self._reader.read_metadata()
        except (pickle.UnpicklingError, EOFError) as e:
            raise ConvertError(f"{self.folder / '.metadata'}: torn or not readable: {e}") from None
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def find(self, weight: Weight) -> tuple[str, Place]:
        """The key under which a parameter is stored, and its place there.

        Raises:
            ConvertError: it is not there, or has another shape.
        """
        tried: list[str] = []
        for stacked in (True, False):
            spot = place(self.architecture, weight, stacked)
            for key in spot.keys:
                about = self._metadata.state_dict_metadata.get(key)
                if isinstance(about, TensorStorageMetadata):
                    self._check(key, about, spot, weight)
                    return key, spot
                tried.append(key)
        raise ConvertError(
            f"{self.folder}: no tensor of the names {', '.join(dict.fromkeys(tried))}: the"
            " checkpoint is of another model than config.json, or of a layout that this program"
            " does not know (fsdp_dtensor, singleton shards)"
        )

    def _check(self, key: str, about: TensorStorageMetadata, spot: Place, weight: Weight) -> None:
        wanted, size = (*spot.lead, *weight.shape), tuple(about.size)
        padded = isinstance(weight.split, VocabularyRows)
        fits = size == wanted or (padded and size[0] >= wanted[0] and size[1:] == wanted[1:])
        if not fits:
            raise ConvertError(
                f"{self.folder}: {key} is {list(size)} and config.json makes it {list(wanted)}"
            )

    def dtype(self, weight: Weight) -> torch.dtype:
        """Number format that a parameter is stored in."""
        about = self._metadata.state_dict_metadata[self.find(weight)[0]]
        assert isinstance(about, TensorStorageMetadata)
        found: torch.dtype = about.properties.dtype
        return found

    def row_ranges(self, weight: Weight, max_bytes: int) -> list[tuple[int, int]]:
        """Ranges of rows that no stored piece crosses, of at most `max_bytes` where it can be."""
        key, spot = self.find(weight)
        about = self._metadata.state_dict_metadata[key]
        assert isinstance(about, TensorStorageMetadata)
        axis, rows = len(spot.lead), weight.shape[0]
        row_bytes = weight.elements // rows * self.dtype(weight).itemsize
        spans = {
            (chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis])
            for chunk in about.chunks
            if all(
                chunk.offsets[dim] <= at < chunk.offsets[dim] + chunk.sizes[dim]
                for dim, at in enumerate(spot.at)
            )
        }
        cuts = sorted({end for _, end in spans if end < rows} | {rows})
        cuts = [c for c in cuts if not any(begin < c < end for begin, end in spans)] or [rows]
        ranges: list[tuple[int, int]] = []
        begin = 0
        for cut, after in zip(cuts, [*cuts[1:], None], strict=True):
            if after is None or (after - begin) * row_bytes > max_bytes:
                ranges.append((begin, cut))
                begin = cut
        return ranges

    def read(self, weight: Weight, rows: tuple[int, int] | None = None) -> Tensor:
        """A parameter, without the vocabulary's padding, or some of its rows."""
        key, spot = self.find(weight)
        first, last = rows or (0, weight.shape[0])
        shape = (last - first, *weight.shape[1:])
        rest = (0,) * (len(weight.shape) - 1)
        chunk = ChunkStorageMetadata(
            torch.Size((*spot.at, first, *rest)), torch.Size(((1,) * len(spot.at)) + shape)
        )
        about: Any = self._metadata.state_dict_metadata[key]
        items = create_read_items_for_chunk_list(key, about, [chunk])
        out = torch.empty(chunk.sizes, dtype=about.properties.dtype)
        covered = sum(item.lengths.numel() for item in items)
        if covered != out.numel():
            raise ConvertError(f"{self.folder}: {key} is stored with gaps: save it again")
        self._reader.read_data(LoadPlan(items), _Into(out)).wait()
        return out.view(shape)


class _Into(DefaultLoadPlanner):
    """Reads the pieces of one tensor into `out`."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self._out = out

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._out
        for dim, (start, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, size)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The tensor was filled in place."""
