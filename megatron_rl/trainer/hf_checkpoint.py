"""Reading and writing Hugging Face directories for a sharded model."""

import itertools
import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.files import naming_full_disk, replace_file, replace_folder, sibling
from megatron_rl.models.safetensors_directory import INDEX, SafetensorsDirectory
from megatron_rl.trainer import world
from megatron_rl.trainer.export import Stream, export
from megatron_rl.trainer.shards import ModelShards

COPIED = (
    *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt"),
)
"""Files other than weights that are copied from the source directory."""


def write(
    directory: str | Path, source: str | Path, stream: Stream, max_shard_bytes: int = 4 * 2**30
) -> Path:
    """Write a Hugging Face directory: `stream` as safetensors, other files from `source`.

    The files go to a hidden sibling, which is renamed to `directory` when it is complete; an older
    directory of that name is replaced. Called by one rank.
    """
    path, source = Path(directory), Path(source)
    work = sibling(path, "tmp")
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
        replace_file(work / INDEX, json.dumps(index, indent=2))
    with naming_full_disk(work):
        for name in filter(lambda name: (source / name).is_file(), COPIED):
            shutil.copyfile(source / name, work / name)
    replace_folder(work, path)
    return path


def _flush(work: Path, shards: list[dict[str, Tensor]]) -> None:
    """Write the last shard and keep only its names."""
    with naming_full_disk(work):
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
        if policy.architecture.untrained:  # a vision tower
            reader = SafetensorsDirectory(source)
            names = sorted(policy.architecture.passthrough(reader.tensors))
            stream = itertools.chain(stream, ((name, reader.read(name)) for name in names))
        write(directory, source, stream)
    dist.barrier(group=group)
