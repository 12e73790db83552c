"""Small checkpoints of every architecture, without Megatron and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.models import architecture, tiny
from megatron_rl.models.safetensors_directory import INDEX

MULTIMODAL = "tiny_scout_multimodal"
VISION = {
    "vision_model.patch_embedding.linear.weight": (24, 12),
    "vision_model.layernorm_pre.weight": (24,),
    "multi_modal_projector.linear_1.weight": (64, 24),
}
NAMES = ("tiny_dense", "tiny_scout", "tiny_qwen3", "tiny_qwen3_moe", MULTIMODAL)


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a small model; the multimodal one contains `tiny_scout`."""
    if name == MULTIMODAL:
        text = {**tiny.CONFIGS["tiny_scout"], **changes}
        return {"model_type": "llama4", "text_config": text, "dtype": "float32"}
    return {**tiny.CONFIGS[name], **changes}


def write(
    directory: Path,
    name: str,
    dtype: torch.dtype = torch.float32,
    files: int = 1,
    **changes: Any,
) -> dict[str, Tensor]:
    """Write a checkpoint with random values and return them.

    Args:
        directory: created.
        name: one of `NAMES`.
        dtype: of the trained tensors; those of the vision tower are fp16.
        files: number of safetensors files, about.
        changes: keys of the (text) configuration.
    """
    directory.mkdir(parents=True)
    config = config_of(name, **changes)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text('{"made": "up"}')
    rng = torch.Generator().manual_seed(3)
    shapes = {n: (s, dtype) for n, s in architecture(config).shapes().items()}
    if name == MULTIMODAL:
        shapes |= {n: (s, torch.float16) for n, s in VISION.items()}
    tensors = {n: torch.randn(s, generator=rng).to(d) for n, (s, d) in shapes.items()}
    total = sum(t.nbytes for t in tensors.values())
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=-(-total // files))
    for file, names in split.filename_to_tensors.items():
        save_file({n: tensors[n] for n in names}, directory / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index))
    return tensors
