"""Megatron's distributed checkpoint, of any layout -> a Hugging Face directory.

The files are those of `save_pretrained`: `model.safetensors`, or `model-00001-of-00005.safetensors`
and so on with `model.safetensors.index.json`, and what else was beside the weights. One file is one
part of the conversion.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.commands.convert import job
from megatron_rl.commands.convert.distributed import Checkpoint, locate
from megatron_rl.commands.convert.errors import ConvertError
from megatron_rl.commands.convert.pieces import PIECE_BYTES
from megatron_rl.commands.convert.release import release
from megatron_rl.commands.convert.safetensor import (
    DTYPES,
    INDEX,
    NAMES,
    Source,
    Writer,
    shard_names,
)
from megatron_rl.commands.convert.to_megatron import copy_other_files
from megatron_rl.models import architecture
from megatron_rl.models.mapping import Same, Weight


@dataclass(frozen=True, slots=True)
class Job:
    """What is converted, and how; the same in every worker."""

    source: Path
    target: Path
    like: Path
    """Hugging Face directory with config.json and the tensors that Megatron does not hold."""
    shard_bytes: int
    dtype: str | None
    """Number format of the result, by its name in a safetensors header; None: as stored."""


@dataclass(frozen=True, slots=True)
class _Plan:
    checkpoint: Checkpoint
    untouched: Source | None
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """(number format, shape) by name, in order."""
    makers: dict[str, list[Weight]]
    """Parameters that make up a tensor, by its name."""
    files: dict[str, list[str]]


def convert(
    source: Path,
    target: Path,
    like: Path | None,
    shard_bytes: int,
    dtype: torch.dtype | None,
    workers: int,
    say: Callable[[str], None],
) -> Path:
    """Converts a Megatron checkpoint, written by any layout.

    Args:
        source: see `distributed.locate`.
        target: made; must not exist.
        like: Hugging Face directory that the training started from; default: the one that a
            converted checkpoint carries along.
        shard_bytes: most bytes of one file.
        dtype: number format of the trained tensors; None: as stored.
        workers: processes.
        say: is told about progress.

    Raises:
        ConvertError: no checkpoint, one of another model, or no Hugging Face directory to take
            the configuration from.
    """
    locate(source)
    made = Job(
        source.resolve(),
        target.absolute(),
        _like(source, like).resolve(),
        shard_bytes,
        None if dtype is None else NAMES[dtype],
    )
    _plan.cache_clear()
    plan = _plan(made)
    read = [made.like / "config.json", *(plan.untouched.files if plan.untouched else [])]
    folder = plan.checkpoint.folder
    about = {
        "direction": "megatron to huggingface",
        "source": job.fingerprint([*read, folder / ".metadata", *sorted(folder.glob("*.distcp"))]),
        "shard_bytes": shard_bytes,
        "dtype": made.dtype,
    }
    with job.started(made.target, about) as work:
        part = functools.partial(_part, made)
        done = job.run_parts(work, len(plan.files), part, workers, say)
        _finish(made, plan, work)
        return job.complete(work, done)


def _like(source: Path, given: Path | None) -> Path:
    path = given or source / "huggingface"
    if not (path / "config.json").is_file():
        why = "--like names no Hugging Face directory" if given else "it carries none along"
        raise ConvertError(
            f"{source}: no config.json at {path} ({why}): give the Hugging Face directory that the"
            " training started from with --like"
        )
    return path


@functools.lru_cache(maxsize=1)
def _plan(made: Job) -> _Plan:
    config = json.loads((made.like / "config.json").read_text())
    arch = architecture(config)
    untouched = _untouched(made.like)
    if untouched is None and arch.untrained:
        raise ConvertError(
            f"{made.like}: config.json has model_type {config.get('model_type')!r}, whose"
            f" {', '.join(arch.untrained)} tensors Megatron does not hold, and there are none:"
            " give a complete Hugging Face directory with --like"
        )
    checkpoint = Checkpoint(made.source, arch)
    makers: dict[str, list[Weight]] = {}
    for weight in arch.weights():
        if weight.exported:
            for name in weight.hf:
                makers.setdefault(name, []).append(weight)
    tensors = {
        name: (made.dtype or NAMES[checkpoint.dtype(makers[name][0])], shape)
        for name, shape in arch.shapes().items()
    }
    beside = {} if untouched is None else untouched.entries
    for name in arch.passthrough(beside):
        tensors[name] = (beside[name].dtype, beside[name].shape)
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
        sizes[name] = torch.Size(shape).numel() * DTYPES[dtype].itemsize
    return _Plan(checkpoint, untouched, tensors, makers, shard_names(sizes, made.shard_bytes))


def _untouched(like: Path) -> Source | None:
    """The tensors beside config.json: those carried along, or a whole Hugging Face directory's."""
    if any(like.glob("untouched*.safetensors")):
        return Source(like, "untouched*.safetensors")
    if any(like.glob("*.safetensors")):
        return Source(like)
    return None


def _part(made: Job, part: int) -> job.Done:
    """Writes one file."""
    plan, work = _plan(made), job.Work(made.target)
    file, names = list(plan.files.items())[part]
    path = work.tree / file
    with Writer(path, {name: plan.tensors[name] for name in names}) as writer:
        here = set(names)
        seen: dict[str, Weight] = {}
        for name in names:
            if name in plan.makers:
                seen |= {weight.megatron: weight for weight in plan.makers[name]}
                continue
            assert plan.untouched is not None
            for offset, block in plan.untouched.blocks(name):
                writer.write(name, block, offset)
        for weight in seen.values():
            _write(plan, writer, weight, here)
    return job.Done({file: job.file_sum(path)})


def _write(plan: _Plan, writer: Writer, weight: Weight, here: set[str]) -> None:
    """Writes what a parameter makes up of the tensors in `here`."""
    whole = not isinstance(weight.pack, Same)
    ranges = [None] if whole else plan.checkpoint.row_ranges(weight, PIECE_BYTES)
    for rows in ranges:
        release()
        parts = weight.pack.part(plan.checkpoint.read(weight, rows))
        for name, tensor in zip(weight.hf, parts, strict=True):
            if name in here:
                stored = _as(tensor, plan.tensors[name][0])
                row_bytes = stored.numel() // stored.shape[0] * stored.element_size()
                offset = 0 if rows is None else rows[0] * row_bytes
                if weight.index is not None:
                    offset += weight.index * _bytes(weight, name, stored)
                writer.write(name, stored, offset)


def _bytes(weight: Weight, name: str, stored: Tensor) -> int:
    """Bytes of one entry of a tensor that holds all experts."""
    shape = weight.hf_shapes()[weight.hf.index(name)]
    return torch.Size(shape).numel() * stored.element_size()


def _as(tensor: Tensor, dtype: str) -> Tensor:
    return tensor.to(DTYPES[dtype])


def _finish(made: Job, plan: _Plan, work: job.Work) -> None:
    """The index, and the files that are no weights."""
    if len(plan.files) > 1:
        total = 0
        for dtype, shape in plan.tensors.values():
            total += torch.Size(shape).numel() * DTYPES[dtype].itemsize
        weight_map = {name: file for file, names in plan.files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (work.tree / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    copy_other_files(made.like, work.tree)
    if made.dtype is not None:
        _say_dtype(work.tree / "config.json", DTYPES[made.dtype])


def _say_dtype(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text())
    name = str(dtype).removeprefix("torch.")
    for section in (config, config.get("text_config")):
        if section is not None:
            for key in ("dtype", "torch_dtype"):
                if key in section:
                    section[key] = name
    path.write_text(json.dumps(config, indent=2) + "\n")
