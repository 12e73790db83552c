"""Parameters of a Megatron distributed checkpoint, written by any layout, and their names.

In `torch_dist`, `.metadata` maps rectangles of tensors to byte ranges of `*.distcp` files. Rules of
megatron-core 0.19 (and of its predecessors since 0.8) for the names of tensors:

- If all layers are alike, they share one tensor per parameter, [layers, ...], whose name has no
  layer number. If `moe_layer_freq` is a list, each layer has its own names.
- Experts share one tensor, [experts, ...], inside that of the layers.
- Both specs use Transformer Engine's names of the norms, which are fused into the linear layer that
  follows. One differs: the norm before a mixture of experts is `mlp.linear_fc1.layer_norm_weight`
  in the local spec and `pre_mlp_layernorm.weight` in Transformer Engine's.
- Every linear layer has an `_extra_state` object (FP8 scales; None without). Transformer Engine's
  norms and attention may have one as well.
"""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, planner, planner_helpers
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron_rl.commands.convert.resumable import ConvertError
from megatron_rl.models import run_checkpoint
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import VocabularyRows, Weight, transformer_engine_name

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
BACKEND = "torch_dist"
_LOCAL_MOE_NORM, _TE_MOE_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """Position of one parameter in the tensors of a checkpoint.

    Example: expert 3 of layer 7, in a model of 32 identical layers with 8 experts:
    `StoredParameter(("decoder.layers.mlp.experts.experts.linear_fc2.weight",), (32, 8), (7, 3))`.
    """

    keys: tuple[str, ...]  # names of the tensor: one, or the local spec's and Transformer Engine's
    stack: tuple[int, ...]  # sizes of the dimensions before those of the parameter: layers, experts
    index: tuple[int, ...]  # index in those dimensions


def stored_parameter(architecture: Architecture, weight: Weight, stacked: bool) -> StoredParameter:
    """Return the position of a parameter, with `stacked` layers or with layers by name."""
    name, stack, index = weight.megatron, list[int](), list[int]()
    if weight.layer is not None and stacked:
        stack, index = [architecture.layers], [weight.layer]
        name = name.replace(f".layers.{weight.layer}.", ".layers.")
    if weight.expert is not None:
        stack, index = [*stack, architecture.experts], [*index, weight.expert]
        name = name.replace(f".local_experts.{weight.expert}.", ".experts.")
    name = transformer_engine_name(name)
    keys = dict.fromkeys((name.replace(_TE_MOE_NORM, _LOCAL_MOE_NORM), name))
    return StoredParameter(tuple(keys), tuple(stack), tuple(index))


def extra_states(parameter: StoredParameter) -> list[str]:
    """Return the names of the `_extra_state` objects that belong to a parameter, in both specs.

    Example: `decoder.layers.0.mlp.linear_fc2._extra_state/shard_0_1`.
    """
    index, stack = parameter.index or (0,), parameter.stack or (1,)
    shard = f"/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, stack))}"
    names = []
    for key in parameter.keys:
        module, _, last = key.rpartition(".")
        if last == "weight" and not module.endswith(("word_embeddings", "output_layer", "router")):
            names.append(f"{module}._extra_state{shard}")
        if module.endswith("self_attention.linear_proj") and last == "weight":
            core = module.removesuffix("linear_proj") + "core_attention"
            names.append(f"{core}._extra_state{shard}")
    return names


def locate(directory: Path) -> Path:
    """Return the folder with `.metadata`, given it, a training run's checkpoint or Megatron's.

    Of a run's, the sums of the files there are checked: nothing is made of damaged ones.

    Raises:
        ConvertError: none of them, or a damaged one. Megatron's pretraining script writes a
            `TRACKER` file.
    """
    tracker, folder = directory / TRACKER, directory
    if tracker.is_file():
        iteration = tracker.read_text().strip()
        folder /= iteration if iteration == RELEASE else f"iter_{int(iteration):07d}"
    elif (directory / run_checkpoint.ABOUT).is_file():
        folder /= "model"
        _check_sums(directory)
    if not (folder / ".metadata").is_file():
        raise ConvertError(
            f"{folder}: no .metadata in it: not a Megatron distributed checkpoint ({BACKEND}), or"
            " its save did not finish"
        )
    return folder


def _check_sums(checkpoint: Path) -> None:
    try:
        files = run_checkpoint.read_about(checkpoint)["files"]
        lines = run_checkpoint.problems(checkpoint, [n for n in files if n.startswith("model/")])
    except (FileNotFoundError, ValueError) as e:
        raise ConvertError(str(e)) from None
    if problem := run_checkpoint.first_of(lines):
        others = [p for p in run_checkpoint.find_complete(checkpoint.parent) if p != checkpoint]
        remedy = f"take another: {', '.join(p.name for p in others)}" if others else "none is left"
        raise ConvertError(f"{problem}: {checkpoint} is damaged; {remedy}")


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
        names = self._metadata.state_dict_metadata
        self._stacked = not any(name.startswith("decoder.layers.0.") for name in names)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def _find(self, weight: Weight) -> tuple[str, Any, StoredParameter]:
        """Return key, metadata and position of a parameter of the expected shape."""
        stored = stored_parameter(self.architecture, weight, self._stacked)
        for key in stored.keys:
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
            f"{self.folder}: no tensor of the names {', '.join(stored.keys)}: the checkpoint is of"
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
