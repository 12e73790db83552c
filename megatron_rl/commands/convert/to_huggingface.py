"""Megatron's distributed checkpoint, of any layout -> a Hugging Face directory.

The files are those of `save_pretrained`, and those without weights.
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.commands.convert.distributed import MegatronCheckpoint, locate
from megatron_rl.commands.convert.resumable import ConvertError, Output, Writers, copy_other_files
from megatron_rl.models import architecture
from megatron_rl.models.safetensors_directory import INDEX, SafetensorsDirectory, read_config


def convert(
    source: Path, output: Output, like: Path | None = None, dtype: str | None = None
) -> Path:
    """Convert a Megatron checkpoint (`distributed.locate`) that was written by any layout.

    `like` is the Hugging Face directory that the training started from (default: the one that a
    converted checkpoint contains), `dtype` that of the trained tensors, such as "bfloat16".

    Raises:
        ConvertError: no checkpoint, one of another model, or no Hugging Face directory.
    """
    folder, given, like = locate(source), like, (like or source / "huggingface").resolve()
    if not (like / "config.json").is_file():
        why = "--like names no Hugging Face directory" if given else "the checkpoint contains none"
        raise ConvertError(
            f"{source}: no config.json at {like} ({why}): give the Hugging Face directory that the"
            " training started from with --like"
        )
    arch, untouched = architecture(read_config(like)), None
    if any(like.glob("untouched*.safetensors")):
        untouched = SafetensorsDirectory(like, "untouched*.safetensors")
    elif any(like.glob("*.safetensors")):
        untouched = SafetensorsDirectory(like)
    elif arch.untrained:
        raise ConvertError(
            f"{like}: no safetensors files: Megatron does not hold the"
            f" {', '.join(arch.untrained)} tensors of this architecture; give a complete Hugging"
            " Face directory with --like"
        )
    checkpoint, shapes = MegatronCheckpoint(folder, arch), arch.shapes()
    tensors: dict[str, Tensor] = {}
    for weight in (w for w in arch.weights() if w.exported):
        kind = checkpoint.dtype(weight) if dtype is None else getattr(torch, dtype)
        tensors |= {n: torch.empty(shapes[n], dtype=kind, device="meta") for n in weight.hf}
    if untouched is not None:
        tensors |= {n: untouched.tensors[n] for n in arch.passthrough(untouched.tensors)}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=output.file_bytes)
    files: Writers = {
        file: functools.partial(_write_shard, checkpoint, untouched, {n: tensors[n] for n in names})
        for file, names in split.filename_to_tensors.items()
    }
    sources = [like / "config.json", *(untouched.files if untouched is not None else [])]
    sources += [folder / ".metadata", *sorted(folder.glob("*.distcp"))]
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    finish = functools.partial(_finish, like, index if split.is_sharded else None, dtype)
    settings = {"direction": "megatron to huggingface", "dtype": dtype}
    return output.write(settings, sources, files, finish)


def _write_shard(
    checkpoint: MegatronCheckpoint,
    untouched: SafetensorsDirectory | None,
    tensors: dict[str, Tensor],
    path: Path,
) -> None:
    """Write a file with the given tensors, which are on the meta device."""
    out: dict[str, Tensor] = {}
    for weight in checkpoint.architecture.weights():
        if not weight.exported or tensors.keys().isdisjoint(weight.hf):
            continue
        parts = weight.pack.to_huggingface(checkpoint.read(weight))
        for name, part in zip(weight.hf, parts, strict=True):
            if name in tensors and weight.index is None:
                out[name] = part.to(tensors[name].dtype).contiguous()
            elif name in tensors:
                if name not in out:
                    out[name] = torch.empty_like(tensors[name], device="cpu")
                out[name][weight.index] = part
    if untouched is not None:
        out |= {name: untouched.read(name) for name in tensors.keys() - out.keys()}
    save_file(out, path, metadata={"format": "pt"})


def _finish(
    like: Path, index: dict[str, Any] | None, dtype: str | None, tree: Path, _: list[Any]
) -> None:
    if index is not None:
        (tree / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    copy_other_files(like, tree)
    if dtype is None:
        return
    config = read_config(tree)
    for section in (config, config.get("text_config") or {}):
        for key in {"dtype", "torch_dtype"} & section.keys():
            section[key] = dtype
    (tree / "config.json").write_text(json.dumps(config, indent=2) + "\n")
