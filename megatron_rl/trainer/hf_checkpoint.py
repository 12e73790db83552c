"""Reading and writing Hugging Face directories for a sharded model."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.files import replace_folder
from megatron_rl.models.base import Architecture
from megatron_rl.trainer import world
from megatron_rl.trainer.export import Stream, export
from megatron_rl.trainer.shards import ModelShards

COPIED = (
    *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt"),
)
"""Files other than weights that are copied from the source directory."""


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the contents of `config.json`.

    Raises:
        FileNotFoundError: not a Hugging Face directory.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: {directory} must be a Hugging Face model directory"
        )
    config: dict[str, Any] = json.loads(path.read_text())
    return config


class TensorReader:
    """Tensors of a Hugging Face directory by name, read on demand; a context manager.

    At most two files are mapped, so reading in file order keeps a small part of a large checkpoint
    in memory. (Two, because the tensors of one parameter may lie in neighboring files.)

    Raises:
        FileNotFoundError: a file of the checkpoint is missing.
        ValueError: the index and the files name different tensors.
    """

    MAPPED_FILES: ClassVar[int] = 2

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._file_of: dict[str, str] = {}
        self._mapped: OrderedDict[str, Any] = OrderedDict()

    def __enter__(self) -> TensorReader:
        index = self.directory / "model.safetensors.index.json"
        listed = json.loads(index.read_text())["weight_map"] if index.is_file() else None
        for file in ["model.safetensors"] if listed is None else sorted(set(listed.values())):
            path = self.directory / file
            if not path.is_file():
                raise FileNotFoundError(f"{path} does not exist: the checkpoint is incomplete")
            with safe_open(path, framework="pt") as opened:
                self._file_of |= dict.fromkeys(opened.keys(), file)
        if listed is not None and listed != self._file_of:
            wrong = sorted(dict(listed.items() ^ self._file_of.items()))
            raise ValueError(
                f"{index} and its files disagree on {', '.join(wrong[:5])}: they are of"
                " different checkpoints; copy the directory again"
            )
        return self

    def __exit__(self, *_: object) -> None:
        while self._mapped:
            self._mapped.popitem()[1].__exit__(None, None, None)

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._file_of)

    def file(self, name: str) -> str:
        """Return the file that holds a tensor.

        Raises:
            KeyError: no such tensor.
        """
        if name not in self._file_of:
            raise KeyError(
                f"{self.directory} has no tensor {name}: its config.json and weights don't belong"
                " together"
            )
        return self._file_of[name]

    def get(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor, or entry `index` of its first dimension."""
        file = self.file(name)
        if file in self._mapped:
            self._mapped.move_to_end(file)
        else:
            if len(self._mapped) >= self.MAPPED_FILES:
                self._mapped.popitem(last=False)[1].__exit__(None, None, None)
            opened: Any = safe_open(self.directory / file, framework="pt")
            self._mapped[file] = opened.__enter__()
        held = self._mapped[file]
        tensor: Tensor = held.get_tensor(name) if index is None else held.get_slice(name)[index]
        return tensor


def passthrough(directory: str | Path, architecture: Architecture) -> Stream:
    """Yield the checkpoint's tensors that are not trained (a vision tower), by name."""
    if not architecture.untrained:
        return
    with TensorReader(directory) as reader:
        for name in sorted(architecture.passthrough(reader.names())):
            yield name, reader.get(name)


def write(
    directory: str | Path, source: str | Path, stream: Stream, max_shard_bytes: int = 4 * 2**30
) -> Path:
    """Write a Hugging Face directory: `stream` as safetensors, other files from `source`.

    The files go to a hidden sibling, which is renamed to `directory` when it is complete; an older
    directory of that name is replaced. Called by one rank.
    """
    path, source = Path(directory), Path(source)
    work = path.parent / f".{path.name}.tmp{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shards: list[dict[str, Tensor]] = [{}]
    total = filled = 0
    for name, tensor in stream:
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > max_shard_bytes:
            _flush(work, shards)
            shards, filled = [*shards, {}], 0
        shards[-1][name] = tensor.contiguous()
        total, filled = total + size, filled + size
    _flush(work, shards)
    weight_map, count = dict[str, str](), len(shards)
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{count:05d}" if count > 1 else "model"
        (work / f"shard{i}").rename(work / f"{name}.safetensors")
        weight_map |= dict.fromkeys(shard, f"{name}.safetensors")
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, work / name)
    replace_folder(work, path)
    return path


def _flush(work: Path, shards: list[dict[str, Tensor]]) -> None:
    """Write the last shard and keep only its names."""
    save_file(shards[-1], work / f"shard{len(shards) - 1}", metadata={"format": "pt"})
    shards[-1] = dict.fromkeys(shards[-1], torch.empty(0))


def save_huggingface(policy: ModelShards, directory: str | Path, source: str | Path) -> None:
    """Write the model as a Hugging Face directory; collective over the trainer ranks.

    Rank 0 holds one output file and a few buckets at a time, and replaces an older `directory`.
    The others wait for it in the control group, whose time-out outlasts the writing of a file on a
    slow disk. Config, tokenizer files and untrained tensors come from the directory `source`.
    """
    group = world.control_group()
    stream = export(policy, policy.run.weights.bucket_bytes, pace=group)
    if dist.get_rank() == 0:
        untrained = passthrough(source, policy.architecture)
        write(directory, source, itertools.chain(stream, untrained))
    dist.barrier(group=group)
