"""Hugging Face -> Megatron's distributed checkpoint (torch_dist), for every layout at once.

    release/        .metadata, metadata.json, common.pt, __0_0.distcp ...: `--load` of Megatron
    huggingface/    config.json, tokenizer, ...; untouched*.safetensors: tensors not in Megatron

Tensors are stored unsharded, as ranges of rows: any tensor, pipeline and expert parallel layout
reads its own bytes. If the local spec and Transformer Engine's name a tensor differently, both
names point to the same bytes. There is no optimizer state.
"""

import functools
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, planner
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from megatron_rl.commands.convert import distributed
from megatron_rl.commands.convert.resumable import ConvertError, Output, Writers, copy_other_files
from megatron_rl.models import architecture
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import UNCHANGED, Weight
from megatron_rl.models.safetensors_directory import SafetensorsDirectory, read_config

CHUNK_BYTES = 32 * 2**20  # of a parameter that is one Hugging Face tensor; others are one chunk


def convert(source: Path, output: Output) -> Path:
    """Convert a Hugging Face directory.

    Raises:
        CheckpointError: the source is incomplete or does not match its config.json.
    """
    source = source.resolve()
    arch, reader = architecture(read_config(source)), SafetensorsDirectory(source)
    untouched = {name: reader.tensors[name] for name in arch.passthrough(reader.tensors)}
    leftovers = reader.check(arch)
    if leftovers and not output.quiet:
        first = ", ".join(sorted(leftovers)[:3])
        print(f"ignoring {len(leftovers)} tensors that the model does not have ({first})")
    plan = CheckpointPlan(reader, arch, output.file_bytes)
    files: Writers = {
        f"{distributed.RELEASE}/__{number}_0.distcp": functools.partial(_write_part, plan, number)
        for number in range(len(plan.parts))
    }
    pattern = "huggingface/untouched{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(
        untouched, max_shard_size=output.file_bytes, filename_pattern=pattern
    )
    for file, names in split.filename_to_tensors.items():
        files[file] = functools.partial(_write_untouched, reader, names)
    sources = [source / "config.json", *reader.files]
    settings = {"direction": "huggingface to megatron"}
    return output.write(settings, sources, files, functools.partial(_finish, source, plan))


class CheckpointPlan(DefaultSavePlanner):
    """Tensors, objects and chunks of the checkpoint; reads a chunk only when it is written.

    Raises:
        ConvertError: tensors of one parameter have several dtypes.
    """

    def __init__(self, source: SafetensorsDirectory, arch: Architecture, part_bytes: int) -> None:
        super().__init__()
        self.source, self.part_bytes, self._filled = source, part_bytes, 0
        self.contents: dict[str, Any] = {}  # tensors and objects by key
        self.state = dcp.MetadataIndex("extra_states")  # every `_extra_state` is a copy of it
        self.parts = [[planner.WriteItem(self.state, planner.WriteItemType.BYTE_IO)]]
        # Other index of written data -> the index that it is written under.
        self.copies: dict[dcp.MetadataIndex, dcp.MetadataIndex] = {}
        self._weights: dict[dcp.MetadataIndex, Weight] = {}
        stacked = "moe_layer_freq" not in arch.config_fields()
        for weight in (w for w in arch.weights() if w.exported):  # tied: stored once
            stored = distributed.stored_parameter(arch, weight, stacked)
            self._add(weight, stored)
            for name in distributed.extra_states(stored):
                self.contents[name] = dcp.BytesStorageMetadata()
                self.copies[dcp.MetadataIndex(name)] = self.state

    def _add(self, weight: Weight, stored: distributed.StoredParameter) -> None:
        key, dtypes = stored.keys[0], {self.source.tensors[name].dtype for name in weight.hf}
        if key in self.contents:
            dtypes.add(self.contents[key].properties.dtype)
        if len(dtypes) > 1:
            raise ConvertError(
                f"{self.source.directory}: {', '.join(weight.hf)} have dtypes"
                f" {', '.join(sorted(map(str, dtypes)))}, those of the same parameter in other"
                " layers included: Megatron stores them as one tensor, so they must agree"
            )
        dtype, size = dtypes.pop(), torch.Size((*stored.stack, *weight.shape))
        for name in stored.keys:
            tensor = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), size, [])
            self.contents.setdefault(name, tensor)
        rows, *rest = weight.shape
        row_bytes = weight.elements * dtype.itemsize // rows
        step = max(1, CHUNK_BYTES // row_bytes) if weight.pack is UNCHANGED else rows
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            offsets = torch.Size((*stored.index, begin, *(0 for _ in rest)))
            sizes = torch.Size((*(1 for _ in stored.index), count, *rest))
            chunk = dcp.ChunkStorageMetadata(offsets, sizes)
            index, *others = (dcp.MetadataIndex(name, offsets) for name in stored.keys)
            for name in stored.keys:
                self.contents[name].chunks.append(chunk)
            self.copies |= dict.fromkeys(others, index)
            self._weights[index] = weight
            data = planner.TensorWriteData(chunk, self.contents[key].properties, size)
            if self._filled and self._filled + count * row_bytes > self.part_bytes:
                self.parts, self._filled = [*self.parts, []], 0
            shard = planner.WriteItemType.SHARD
            self.parts[-1].append(planner.WriteItem(index, shard, tensor_data=data))
            self._filled += count * row_bytes

    def resolve_data(self, write_item: planner.WriteItem) -> Tensor | io.BytesIO:
        """Return the data of an item."""
        if write_item.index == self.state:  # as Megatron saves that of a linear layer
            stream = io.BytesIO()
            torch.save([None], stream)
            return stream
        weight, chunk = self._weights[write_item.index], write_item.tensor_data.chunk
        axis = -len(weight.shape)
        rows = self.source.parameter(weight).narrow(0, chunk.offsets[axis], chunk.sizes[axis])
        return rows.contiguous().view(chunk.sizes)


def _write_part(plan: CheckpointPlan, number: int, path: Path) -> list[Any]:
    writer = FileSystemWriter(path.parent)
    part = writer.prepare_local_plan(planner.SavePlan(plan.parts[number]))
    # The position of a plan is the number in the name of its file.
    parts = writer.prepare_global_plan([*(planner.SavePlan([]) for _ in range(number)), part])
    return writer.write_data(parts[number], plan).wait()


def _write_untouched(source: SafetensorsDirectory, names: list[str], path: Path) -> list[Any]:
    save_file({n: source.read(n) for n in names}, path, metadata={"format": "pt"})
    return []


def _finish(source: Path, plan: CheckpointPlan, tree: Path, written: list[Any]) -> None:
    results = {result.index: result for part in written for result in part}
    for index, original in plan.copies.items():
        results[index] = replace(results[original], index=index)
    del results[plan.state]
    folder = tree / distributed.RELEASE
    FileSystemWriter(folder).finish(dcp.Metadata(plan.contents), [list(results.values())])
    backend = {"sharded_backend": distributed.BACKEND, "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend))
    # Megatron's pretraining script expects this of a checkpoint that has weights only.
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": content}
    torch.save(common, folder / "common.pt")
    (tree / distributed.TRACKER).write_text(distributed.RELEASE)
    copy_other_files(source, tree / "huggingface")
