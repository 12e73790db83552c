"""The base class of architectures, with the parts that the Llama family shares.

An architecture turns a `config.json` into fields of Megatron's `TransformerConfig`, one layer
spec per layer, and one `Weight` per parameter (`mapping`). It is independent of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megatron_rl.models.mapping import GATE_UP, Along, VocabularyRows, Weight, query_key_value

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

COLUMN = Along(0)
ROW = Along(1)
GATED = Along(0, parts=2)


class Architecture(ABC):
    """One Hugging Face `model_type` for Megatron, from the contents of a `config.json`.

    ValueError names the key and the value of a feature that is not implemented.
    """

    interleaved_rope: ClassVar[bool] = False
    rope_theta: ClassVar[float] = 10000.0
    prefix: ClassVar[str] = ""  # of the names of trained tensors in the checkpoint, before `model.`
    untrained: ClassVar[tuple[str, ...]] = ()
    """Prefixes of checkpoint tensors outside Megatron (a vision tower)."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        self.hf = hf
        self.vocabulary = int(hf["vocab_size"])
        self.padded_vocabulary: int | None = None
        """Rows of embedding and LM head where a script chose them (`VocabularyRows.padded`)."""
        self.hidden = int(hf["hidden_size"])
        self.layers = int(hf["num_hidden_layers"])
        self.heads = int(hf["num_attention_heads"])
        self.groups = int(hf.get("num_key_value_heads") or self.heads)
        self.head_dim = int(hf.get("head_dim") or self.hidden // self.heads)
        self.positions = int(hf["max_position_embeddings"])
        self.tied = bool(hf.get("tie_word_embeddings", False))
        self.feed_forward = int(hf["intermediate_size"])
        """Width of the MLP of a layer without experts."""
        self.expert_feed_forward = 0
        self.moe_layers: set[int] = set()  # layers with routed experts, from 0
        self.experts = 0
        self.require("hidden_act", "silu")
        self.require("attention_bias", False)
        self.require("mlp_bias", False)

    def require(self, key: str, value: Any) -> None:
        """Raise ValueError if the configuration has `key` with another value."""
        actual = self.hf.get(key, value)
        if actual != value:
            only = f"{type(self).__name__} implements {value!r} only"
            raise ValueError(f"config.json has {key} = {actual!r}: {only}")

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of Megatron's TransformerConfig that the architecture determines."""
        fields = {
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
            "ffn_hidden_size": self.feed_forward,
        }
        if self.moe_layers:
            fields |= {
                "num_moe_experts": self.experts,
                "moe_layer_freq": [int(i in self.moe_layers) for i in range(self.layers)],
                "moe_ffn_hidden_size": self.expert_feed_forward,
                "moe_router_topk": self.experts_per_token,
                "moe_router_dtype": "fp32",
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.0,
            }
        return fields

    @property
    def experts_per_token(self) -> int:
        """Routed experts of a token in a layer with experts; 0 for a dense model."""
        return int(self.hf["num_experts_per_tok"]) if self.experts else 0

    def layer_options(self, layer: int) -> dict[str, Any]:
        """Return the options of `attention.layer_spec` for a layer."""
        return {"experts": self.experts if layer in self.moe_layers else 0}

    def layer_specs(self, use_te: bool) -> list[ModuleSpec]:
        """Return the specs of all layers, with Transformer Engine or Megatron's local modules."""
        from megatron_rl.models import attention

        return [attention.layer_spec(use_te, **self.layer_options(i)) for i in range(self.layers)]

    @abstractmethod
    def layer_weights(self, layer: int) -> list[Weight]:
        """Return the parameters of one layer, except those of its attention."""

    def weights(self) -> list[Weight]:
        """Return every parameter, in the order of the forward pass."""
        rows = VocabularyRows(self.vocabulary, self.padded_vocabulary)
        table = (self.vocabulary, self.hidden)
        embedding, head = f"{self.prefix}model.embed_tokens.weight", f"{self.prefix}lm_head.weight"
        out = [Weight("embedding.word_embeddings.weight", (embedding,), table, split=rows)]
        for layer in range(self.layers):
            out += self._attention_weights(layer) + self.layer_weights(layer)
        norm = (f"{self.prefix}model.norm.weight",)
        out.append(Weight("decoder.final_layernorm.weight", norm, (self.hidden,)))
        # Tied: the last pipeline stage holds a copy under the head's name.
        source = (embedding if self.tied else head,)
        out.append(Weight("output_layer.weight", source, table, split=rows, exported=not self.tied))
        return out

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every trained tensor by its name in the checkpoint."""
        out: dict[str, tuple[int, ...]] = {}
        for weight in self.weights():
            for name, shape in zip(weight.hf, weight.hf_shapes(), strict=True):
                out[name] = shape if weight.index is None else (self.experts, *shape)
        return out

    def passthrough(self, names: Iterable[str]) -> list[str]:
        """Return the names of a checkpoint that are not trained and are exported unchanged."""
        return [name for name in names if name.startswith(self.untrained)]

    def leftovers(self, names: Iterable[str]) -> list[str]:
        """Return the rotary buffers and the tied head that tools for fine-tuning write."""
        head = f"{self.prefix}lm_head.weight" if self.tied else None
        return [n for n in names if n == head or n.endswith("rotary_emb.inv_freq")]

    def parameters(self) -> int:
        """Return the number of trained parameters; tied embeddings count once."""
        return sum(w.elements for w in self.weights() if w.exported)

    def active_parameters(self) -> int:
        """Return the number of parameters of one token's forward pass: of experts, its own."""
        total = self.parameters()
        routed = sum(w.elements for w in self.weights() if w.expert is not None)
        return total - routed + routed // max(self.experts, 1) * self.experts_per_token

    def names(self, layer: int) -> tuple[str, str]:
        """Return the prefixes of a layer's parameter names: (Megatron's, Hugging Face's)."""
        return f"decoder.layers.{layer}.", f"{self.prefix}model.layers.{layer}."

    def _attention_weights(self, layer: int) -> list[Weight]:
        m, h = self.names(layer)
        queries, keys = self.heads * self.head_dim, self.groups * self.head_dim
        fused, output = (queries + 2 * keys, self.hidden), (self.hidden, queries)
        qkv = tuple(f"{h}self_attn.{x}_proj.weight" for x in "qkv")
        proj, pack = (h + "self_attn.o_proj.weight",), query_key_value(self.groups, self.head_dim)
        return [
            Weight(m + "input_layernorm.weight", (h + "input_layernorm.weight",), (self.hidden,)),
            Weight(m + "self_attention.linear_qkv.weight", qkv, fused, pack, COLUMN),
            Weight(m + "self_attention.linear_proj.weight", proj, output, split=ROW),
        ]

    def head_norm_weights(self, layer: int) -> list[Weight]:
        """Return the RMS norms of each head's query and key; heads share the weights."""
        m, h = self.names(layer)
        own, shape = m + "self_attention", (self.head_dim,)
        return [
            Weight(f"{own}.{x}_layernorm.weight", (f"{h}self_attn.{x}_norm.weight",), shape)
            for x in "qk"
        ]

    def mlp_norm_weight(self, layer: int, dense: bool) -> Weight:
        """Return the norm before a layer's MLP."""
        m, h = self.names(layer)
        # mapping.local_name and transformer_engine_name translate `pre_dense_layernorm`.
        name = "pre_dense_layernorm" if dense else "pre_mlp_layernorm"
        return Weight(f"{m}{name}.weight", (h + "post_attention_layernorm.weight",), (self.hidden,))

    def gated_weights(
        self, megatron: str, hf: str, size: int, expert: int | None = None
    ) -> list[Weight]:
        """Return gate, up and down of a gated MLP, `size` wide, whose modules have these names."""
        gate_up = tuple(f"{hf}.{x}_proj.weight" for x in ("gate", "up"))
        fc1, fc2 = f"{megatron}.linear_fc1.weight", f"{megatron}.linear_fc2.weight"
        return [
            Weight(fc1, gate_up, (2 * size, self.hidden), GATE_UP, GATED, expert=expert),
            Weight(fc2, (f"{hf}.down_proj.weight",), (self.hidden, size), split=ROW, expert=expert),
        ]

    def dense_mlp_weights(self, layer: int, hf_mlp: str, size: int) -> list[Weight]:
        """Return norm, gate, up and down of a dense layer; `hf_mlp` is the HF module."""
        m, h = self.names(layer)
        gated = self.gated_weights(m + "mlp", h + hf_mlp, size)
        return [self.mlp_norm_weight(layer, dense=True), *gated]

    def inverse_frequencies(self) -> Tensor:
        """Compute the rotary frequencies [head_dim / 2] in fp32, as transformers does.

        Raises:
            ValueError: a `rope_type` other than `default` and `llama3`.
        """
        rope = dict(self.hf.get("rope_parameters") or self.hf.get("rope_scaling") or {})
        theta = float(rope.get("rope_theta", self.hf.get("rope_theta", self.rope_theta)))
        # On the CPU, also inside `torch.device("meta")`.
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device="cpu")
        exponents = pairs.float() / self.head_dim
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
