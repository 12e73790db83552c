"""Models that learn on a laptop: real architectures, a fraction of a million parameters.

`create` writes what `save_pretrained` of transformers would write (same file names, same tensor
names), without importing it: config.json, generation_config.json and model.safetensors with
initial weights. The tokenizer's files are the caller's.

| name | architecture | parameters | active |
|---|---|---|---|
| tiny_scout | Llama 4: RoPE, RoPE, NoPE; 4 experts + shared, top-1, QK norm | 0.33M | 0.16M |
| tiny_dense | Llama: 3 layers, SwiGLU | 0.16M | 0.16M |
| tiny_qwen3 | Qwen3: tiny_dense with a norm of each head's query and key | 0.16M | 0.16M |
| tiny_qwen3_moe | Qwen3 mixture of experts: 4 experts, top-2, no shared one | 0.28M | 0.17M |
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.models import architecture

VOCABULARY = 32
PAD, BOS, EOS = 0, 1, 2
# vLLM's CPU attention needs a head size of 32 or more, and its CPU MoE sizes that 32 divides.
_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "dtype": "float32",
    "eos_token_id": EOS,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "tiny_scout": {
        **_COMMON,
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 96,
        "intermediate_size_mlp": 192,
        "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        "moe_layers": [0, 1, 2],
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 0],
        "num_experts_per_tok": 1,
        "num_local_experts": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "use_qk_norm": True,
    },
    "tiny_dense": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 192,
        "mlp_bias": False,
        "pretraining_tp": 1,
    },
    "tiny_qwen3": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": 192,
        "layer_types": ["full_attention"] * 3,
        "max_window_layers": 3,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "tiny_qwen3_moe": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "intermediate_size": 192,
        "mlp_only_layers": [],
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    },
}


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
    """Writes a tiny model with initial weights as a Hugging Face directory.

    Args:
        name: one of `CONFIGS`.
        directory: made when missing; files of the same names are replaced.
        tokenizer_saver: called with the directory to add the tokenizer's files.
        seed: of the initial weights.

    Returns:
        The directory.

    Raises:
        ValueError: another name.
    """
    if name not in CONFIGS:
        raise ValueError(f"no tiny model {name!r}: known are {', '.join(CONFIGS)}")
    config, rng = CONFIGS[name], torch.Generator().manual_seed(seed)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    layers = config["num_hidden_layers"]
    shapes = architecture(config).shapes()
    tensors = {n: _initial(n, s, layers, rng) for n, s in shapes.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    (path / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    if tokenizer_saver is not None:
        tokenizer_saver(path)
    return path
