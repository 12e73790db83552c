"""Models that learn on a laptop: real architectures, a fraction of a million parameters.

`create` writes the files of `save_pretrained` of transformers without importing it.

| name | architecture | parameters | active |
|---|---|---|---|
| tiny_scout | Llama 4: RoPE, RoPE, NoPE; 4 experts + shared, top-1, QK norm | 0.33M | 0.16M |
| tiny_dense | Llama: 3 layers, SwiGLU | 0.16M | 0.16M |
| tiny_qwen3 | Qwen3: tiny_dense with a norm of each head's query and key | 0.16M | 0.16M |
| tiny_qwen3_moe | Qwen3 mixture of experts: 4 experts, top-2, no shared one | 0.28M | 0.17M |
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.config import TINY_MODELS
from megatron_rl.files import naming_full_disk, replace_file
from megatron_rl.models import architecture, named_config

VOCABULARY = 32
PAD, BOS, EOS = 0, 1, 2
CONFIGS = {name: named_config(name) for name in TINY_MODELS}
"""The `config.json` by name. vLLM on CPU needs heads of 32 or more, and MoE sizes of 32 n."""


def _initial(name: str, shape: tuple[int, ...], layers: int, rng: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    if "embed_tokens" in name:
        return torch.randn(shape, generator=rng) * 0.02
    fan_in = shape[-1] if name.endswith(".weight") else shape[-2]
    residual = "o_proj" in name or "down_proj" in name
    std = 0.7 / math.sqrt(fan_in) / (math.sqrt(2 * layers) if residual else 1.0)
    return torch.randn(shape, generator=rng) * std


def create(
    name: str,
    directory: str | Path,
    tokenizer_saver: Callable[[Path], object] | None = None,
    seed: int = 1234,
) -> Path:
    """Write a tiny model of `CONFIGS` with initial weights as a Hugging Face directory; return it.

    Files of the same names are replaced. `tokenizer_saver` is called with the directory to add the
    tokenizer's files. ValueError: another name.
    """
    if name not in CONFIGS:
        raise ValueError(f"no tiny model {name!r}: known are {', '.join(CONFIGS)}")
    config, rng = CONFIGS[name], torch.Generator().manual_seed(seed)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    layers = config["num_hidden_layers"]
    shapes = architecture(config).shapes()
    tensors = {n: _initial(n, s, layers, rng) for n, s in shapes.items()}
    with naming_full_disk(path):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    replace_file(path / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    replace_file(path / "generation_config.json", json.dumps(ends, indent=2) + "\n")
    if tokenizer_saver is not None:
        tokenizer_saver(path)
    return path
