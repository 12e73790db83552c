"""Small checkpoints of every architecture, without Megatron and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.commands.convert.safetensor import INDEX, shard_names
from megatron_rl.models import architecture, tiny

MULTIMODAL = "tiny_scout_multimodal"
VISION = {
    "vision_model.patch_embedding.linear.weight": (24, 12),
    "vision_model.layernorm_pre.weight": (24,),
    "multi_modal_projector.linear_1.weight": (64, 24),
}
NAMES = ("tiny_dense", "tiny_scout", "tiny_qwen3", "tiny_qwen3_moe", MULTIMODAL)


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a small model; the multimodal one holds `tiny_scout`."""
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
    """Writes a checkpoint with random values and returns them.

    Args:
        directory: made.
        name: one of `NAMES`.
        dtype: of the trained tensors; those of the vision tower are fp16.
        files: safetensors files, about.
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
    sizes = {n: t.numel() * t.element_size() for n, t in tensors.items()}
    shards = shard_names(sizes, -(-sum(sizes.values()) // files))
    for file, names in shards.items():
        save_file({n: tensors[n] for n in names}, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {n: file for file, names in shards.items() for n in names}
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors
