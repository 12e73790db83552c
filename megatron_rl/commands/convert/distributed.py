"""Parameters of a Megatron distributed checkpoint, written by any layout.

In `torch_dist`, `.metadata` maps rectangles of tensors to byte ranges of `*.distcp` files.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, planner, planner_helpers
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron_rl.commands.convert.keys import StoredParameter, stored_parameter
from megatron_rl.commands.convert.resumable import ConvertError
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import VocabularyRows, Weight

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
BACKEND = "torch_dist"


def locate(directory: Path) -> Path:
    """Return the folder with `.metadata`, given it, a training run's checkpoint or Megatron's.

    Raises:
        ConvertError: none of them. Megatron's pretraining script writes a `TRACKER` file.
    """
    tracker, folder = directory / TRACKER, directory
    if tracker.is_file():
        iteration = tracker.read_text().strip()
        folder /= iteration if iteration == RELEASE else f"iter_{int(iteration):07d}"
    elif (directory / "trainer.json").is_file():
        folder /= "model"
    if not (folder / ".metadata").is_file():
        raise ConvertError(
            f"{folder}: no .metadata in it: not a Megatron distributed checkpoint ({BACKEND}), or"
            " its save did not finish"
        )
    return folder


class MegatronCheckpoint:
    """Parameters of a model in the folder of a distributed checkpoint.

    Raises:
        ConvertError: a checkpoint of another format, or a torn one.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self.folder, self.architecture = folder, architecture
        self._reader, config = FileSystemReader(folder), folder / "metadata.json"
        backend = json.loads(config.read_text())["sharded_backend"] if config.is_file() else None
        if backend != BACKEND:
            raise ConvertError(f"{config}: sharded_backend is {backend!r}, not {BACKEND!r}")
        try:
            self._metadata = self._reader.read_metadata()
        except (pickle.UnpicklingError, EOFError) as e:
            raise ConvertError(f"{self.folder / '.metadata'}: torn or unreadable: {e}") from None
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def _find(self, weight: Weight) -> tuple[str, Any, StoredParameter]:
        """Return key, metadata and position of a parameter of the expected shape."""
        layouts = (
            stored_parameter(self.architecture, weight, stacked) for stacked in (True, False)
        )
        by_key = {key: stored for stored in layouts for key in stored.keys}
        for key, stored in by_key.items():
            tensor = self._metadata.state_dict_metadata.get(key)
            if not isinstance(tensor, dcp.TensorStorageMetadata):
                continue
            size, expected = list(tensor.size), [*stored.stack, *weight.shape]
            if isinstance(weight.split, VocabularyRows):  # it may be padded
                size[0] = min(size[0], expected[0])
            if size != expected:
                raise ConvertError(f"{self.folder}: {key} is {size}, but config.json: {expected}")
            return key, tensor, stored
        raise ConvertError(
            f"{self.folder}: no tensor of the names {', '.join(by_key)}: the checkpoint is of"
            " another model than config.json, or of a format that is not supported (fsdp_dtensor,"
            " singleton shards)"
        )

    def dtype(self, weight: Weight) -> torch.dtype:
        """Return the dtype in which a parameter is stored."""
        return self._find(weight)[1].properties.dtype

    def read(self, weight: Weight) -> Tensor:
        """Return a parameter, without the padding of the vocabulary."""
        key, tensor, stored = self._find(weight)
        offsets = torch.Size((*stored.index, *(0 for _ in weight.shape)))
        sizes = torch.Size((*(1 for _ in stored.index), *weight.shape))
        chunk = dcp.ChunkStorageMetadata(offsets, sizes)
        items = planner_helpers.create_read_items_for_chunk_list(key, tensor, [chunk])
        out = torch.empty(sizes, dtype=tensor.properties.dtype)
        if sum(item.lengths.numel() for item in items) != out.numel():
            raise ConvertError(f"{self.folder}: {key} is stored with gaps: save it again")
        self._reader.read_data(planner.LoadPlan(items), _ReadInto(out)).wait()
        return out.view(weight.shape)


class _ReadInto(DefaultLoadPlanner):
    """Read the stored parts of one tensor into `out`."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self._out = out

    def lookup_tensor(self, index: dcp.MetadataIndex) -> Tensor:
        return self._out
