"""Hugging Face -> Megatron's distributed checkpoint (torch_dist), for every layout at once.

    <target>/
        latest_checkpointed_iteration.txt   "release": `--load <target> --finetune` of Megatron
        release/            .metadata, metadata.json, common.pt, __0_0.distcp ...
        huggingface/        what is no trained weight: config.json, tokenizer, ...;
                            untouched-*.safetensors has the tensors that Megatron does not hold
        SHA256SUMS

The tensors are whole in it (in pieces of rows, see `pieces`), so that any tensor,
pipeline and expert parallel layout reads its own bytes. Where the local spec and Transformer
Engine's differ in a name, both names are there for the same bytes: either spec loads it.
Optimizer state is not part of it.
"""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rl.commands.convert import job
from megatron_rl.commands.convert.distributed import RELEASE, TRACKER
from megatron_rl.commands.convert.pieces import Job, Piece, Plan, make_plan
from megatron_rl.commands.convert.release import release
from megatron_rl.commands.convert.safetensor import INDEX, Writer

EXTRA_STATES = "extra_states"
"""Item of the first part that all `_extra_state` objects point to."""


def convert(
    source: Path, target: Path, part_bytes: int, workers: int, say: Callable[[str], None]
) -> Path:
    """Converts a Hugging Face directory.

    Args:
        source: with config.json and safetensors.
        target: made; must not exist.
        part_bytes: about the size of a file of the checkpoint.
        workers: processes.
        say: is told about progress.

    Raises:
        ConvertError: a source that is incomplete or of another model than its config.json.
    """
    made = Job(source.resolve(), target.absolute(), part_bytes)
    make_plan.cache_clear()
    plan = make_plan(made)
    about = {
        "direction": "huggingface to megatron",
        "source": job.fingerprint([made.source / "config.json", *plan.source.files]),
        "part_bytes": part_bytes,
    }
    with job.started(made.target, about) as work:
        count = len(plan.parts) + len(plan.untouched)
        done = job.run_parts(work, count, functools.partial(_part, made), workers, say)
        _finish(made, plan, work, done)
        return job.complete(work, done)


class _Lazy(DefaultSavePlanner):
    """Makes the data of an item when it is written."""

    def __init__(self, make: dict[MetadataIndex, Callable[[], Tensor | io.BytesIO]]) -> None:
        super().__init__()
        self._make = make
        self._written: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if self._written is not None:
            # The writer keeps the last tensor of every name until the file is complete.
            self._written.untyped_storage().resize_(0)
        release()
        made = self._make[write_item.index]()
        self._written = made if isinstance(made, Tensor) else None
        return made


def _part(made: Job, part: int) -> job.Done:
    """Writes one file: pieces of parameters, or untouched tensors."""
    plan, work = make_plan(made), job.Work(made.target)
    if part >= len(plan.parts):
        name, tensors = list(plan.untouched.items())[part - len(plan.parts)]
        return _untouched(plan, work, name, tensors)
    make: dict[MetadataIndex, Callable[[], Tensor | io.BytesIO]] = {}
    items = [piece.item for piece in plan.parts[part]]
    make = {p.item.index: functools.partial(_tensor, plan, p) for p in plan.parts[part]}
    if part == 0:
        items.append(WriteItem(MetadataIndex(EXTRA_STATES), WriteItemType.BYTE_IO))
        make[items[-1].index] = _no_state
    writer = _writer(work)
    empty = [SavePlan([]) for _ in range(part)]
    plans = writer.prepare_global_plan([*empty, writer.prepare_local_plan(SavePlan(items))])
    results = writer.write_data(plans[part], _Lazy(make)).wait()
    file = {r.storage_data.relative_path for r in results}.pop()
    name = f"{RELEASE}/{file}"
    return job.Done({name: job.file_sum(work.tree / name)}, results)


def _writer(work: job.Work) -> FileSystemWriter:
    return FileSystemWriter(work.tree / RELEASE, sync_files=True, thread_count=1)


def _tensor(plan: Plan, piece: Piece) -> Tensor:
    weight = piece.weight
    assert piece.item.tensor_data is not None
    rows = piece.rows if piece.rows != (0, weight.shape[0]) else None
    full = weight.pack.join([plan.source.read(name, weight.index, rows) for name in weight.hf])
    if len(weight.hf) == 1:  # as it was read, or a view of that: memory that cannot be given back
        full = full.clone(memory_format=torch.contiguous_format)
    return full.view(piece.item.tensor_data.chunk.sizes)


def _no_state() -> io.BytesIO:
    """An `_extra_state` without content, as Megatron saves the one of a linear layer."""
    stream = io.BytesIO()
    torch.save([None], stream)
    return stream


def _untouched(plan: Plan, work: job.Work, file: str, names: list[str]) -> job.Done:
    path = work.tree / "huggingface" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = plan.source.entries
    with Writer(path, {n: (entries[n].dtype, entries[n].shape) for n in names}) as writer:
        for name in names:
            for offset, block in plan.source.blocks(name):
                writer.write(name, block, offset)
    return job.Done({f"huggingface/{file}": job.file_sum(path)})


def _finish(made: Job, plan: Plan, work: job.Work, done: list[job.Done]) -> None:
    """The metadata of the whole, and the files that are no weights."""
    results: dict[MetadataIndex, WriteResult] = {
        r.index: r for d in done[: len(plan.parts)] for r in d.content
    }
    state = results.pop(MetadataIndex(EXTRA_STATES))
    for alias, key in plan.aliases.items():
        for chunk in plan.metadata.state_dict_metadata[key].chunks:
            stored = results[MetadataIndex(key, chunk.offsets)]
            index = MetadataIndex(alias, chunk.offsets)
            results[index] = replace(stored, index=index)
    for name in plan.objects:
        results[MetadataIndex(name)] = replace(state, index=MetadataIndex(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a killed run may have left a .metadata: it is replaced
        writer = _writer(work)
    writer.finish(plan.metadata, [list(results.values())])
    release = work.tree / RELEASE
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (release / "metadata.json").write_text(json.dumps(backend))
    # What Megatron's pretraining script expects of a checkpoint that has weights alone.
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": content}
    torch.save(common, release / "common.pt")
    (work.tree / TRACKER).write_text(RELEASE)
    copy_other_files(made.source, work.tree / "huggingface")


def copy_other_files(source: Path, target: Path) -> None:
    """Copies what is beside the weights: config.json, tokenizer files, licence, code."""
    target.mkdir(parents=True, exist_ok=True)
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
    for path in sorted(source.iterdir()):
        skipped = path.name.startswith(".") or path.name in (INDEX, job.SUMS)
        if path.is_file() and not skipped and not path.name.endswith((*weights, ".index.json")):
            shutil.copyfile(path, target / path.name)
            os.chmod(target / path.name, 0o644)
