"""What `megatron_rl` must know about an architecture, and what the Llama family shares.

An architecture turns a `config.json` into fields of Megatron's `TransformerConfig`, one layer
spec per layer, and one `Weight` per parameter (`mapping`). It knows nothing of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megatron_rl.models.mapping import (
    Along,
    GateUp,
    QueryKeyValue,
    VocabularyRows,
    Weight,
)

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

COLUMN = Along(0)
"""Output rows of a column-parallel linear layer."""
ROW = Along(1)
"""Input columns of a row-parallel linear layer."""
GATED = Along(0, parts=2)
"""Output rows of a gated linear layer: gate and up are cut alike."""


class Architecture(ABC):
    """One Hugging Face `model_type` for Megatron.

    Args:
        hf: contents of `config.json`.

    Raises:
        ValueError: a feature that this architecture's file does not implement; the message names
            the key and its value.
    """

    interleaved_rope: ClassVar[bool] = False
    """Whether rotary pairs are neighbours rather than halves of the head."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        self.hf = hf
        self.vocabulary = int(hf["vocab_size"])
        self.hidden = int(hf["hidden_size"])
        self.layers = int(hf["num_hidden_layers"])
        self.heads = int(hf["num_attention_heads"])
        self.groups = int(hf.get("num_key_value_heads") or self.heads)
        self.head_dim = int(hf.get("head_dim") or self.hidden // self.heads)
        self.positions = int(hf["max_position_embeddings"])
        self.tied = bool(hf.get("tie_word_embeddings", False))
        self.require("hidden_act", "silu")
        self.require("attention_bias", False)
        self.require("mlp_bias", False)

    def require(self, key: str, value: Any) -> None:
        """Refuses a configuration whose `key` is present with another value."""
        found = self.hf.get(key, value)
        if found != value:
            raise ValueError(
                f"config.json has {key} = {found!r}: {type(self).__name__} implements"
                f" {value!r} only"
            )

    def config_fields(self) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig that the architecture decides."""
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": float(self.hf.get("rms_norm_eps", 1e-6)),
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "rotary_interleaved": self.interleaved_rope,
        }

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        return 0

    @abstractmethod
    def layer_specs(self, use_te: bool) -> list[ModuleSpec]:
        """One spec per layer, of all layers.

        Args:
            use_te: Transformer Engine modules, else Megatron's local ones.
        """

    @abstractmethod
    def layer_weights(self, layer: int) -> list[Weight]:
        """The parameters of one layer beyond its attention."""

    def weights(self) -> list[Weight]:
        """Every parameter, in the order of the forward pass."""
        rows = VocabularyRows(self.vocabulary)
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        out = [Weight("embedding.word_embeddings.weight", (embedding,), split=rows)]
        for layer in range(self.layers):
            out += self._attention_weights(layer) + self.layer_weights(layer)
        out.append(Weight("decoder.final_layernorm.weight", ("model.norm.weight",)))
        if self.tied:  # the last pipeline stage holds a copy under the head's name
            out.append(Weight("output_layer.weight", (embedding,), split=rows, exported=False))
        else:
            out.append(Weight("output_layer.weight", (head,), split=rows))
        return out

    def _attention_weights(self, layer: int) -> list[Weight]:
        m, h = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = tuple(f"{h}self_attn.{x}_proj.weight" for x in "qkv")
        pack = QueryKeyValue(self.groups, self.head_dim)
        return [
            Weight(m + "input_layernorm.weight", (h + "input_layernorm.weight",)),
            Weight(m + "self_attention.linear_qkv.weight", qkv, pack, COLUMN),
            Weight(
                m + "self_attention.linear_proj.weight",
                (h + "self_attn.o_proj.weight",),
                split=ROW,
            ),
        ]

    def dense_mlp_weights(self, layer: int, hf_mlp: str) -> list[Weight]:
        """Norm, gate, up and down of a dense layer whose HF module is `hf_mlp`."""
        m, h = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        gate_up = tuple(f"{h}{hf_mlp}.{x}_proj.weight" for x in ("gate", "up"))
        return [
            # `pre_dense_layernorm` is resolved by mapping.local_name / transformer_engine_name.
            Weight(m + "pre_dense_layernorm.weight", (h + "post_attention_layernorm.weight",)),
            Weight(m + "mlp.linear_fc1.weight", gate_up, GateUp(), GATED),
            Weight(m + "mlp.linear_fc2.weight", (f"{h}{hf_mlp}.down_proj.weight",), split=ROW),
        ]

    def inverse_frequencies(self) -> Tensor:
        """Rotary frequencies [head_dim / 2], fp32, as transformers computes them.

        Raises:
            ValueError: a `rope_type` other than `default` and `llama3`.
        """
        rope = dict(self.hf.get("rope_parameters") or self.hf.get("rope_scaling") or {})
        theta = float(rope.get("rope_theta", self.hf.get("rope_theta", 10000.0)))
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        frequencies = 1.0 / theta**exponents
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return frequencies
        if kind != "llama3":
            raise ValueError(f"config.json has rope_type {kind!r}: known are 'default', 'llama3'")
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        factor, context = float(rope["factor"]), rope["original_max_position_embeddings"]
        wavelength = 2 * math.pi / frequencies
        slowed = torch.where(wavelength > context / low, frequencies / factor, frequencies)
        if low == high:
            return slowed
        smooth = (context / wavelength - low) / (high - low)
        between = (1 - smooth) * slowed / factor + smooth * slowed
        medium = (wavelength >= context / high) & (wavelength <= context / low)
        return torch.where(medium, between, slowed)
