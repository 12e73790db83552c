"""Llama 4 (Scout, Maverick): mixture of experts with RoPE and NoPE layers.

Two kinds of checkpoint hold it: the text model alone, and the multimodal one, of which the text
part is trained and the vision part stays as it is.

Facts that the files of Meta and transformers agree on, and how Megatron is told:

- Router: sigmoid of the top-1 logit, multiplied onto the expert's *input*
  (`moe_apply_probs_on_input`); a shared expert is added; no auxiliary loss in RL.
- RoPE layers (`no_rope_layers[i] == 1`): rotary pairs interleaved, then L2 norm of query and key
  (`use_qk_norm`), attention within aligned chunks of `attention_chunk_size` positions.
- NoPE layers: no rotation, no norm, full causal attention, and queries scaled by
  `1 + attn_scale * log(1 + floor((position + 1) / floor_scale))`.
- Megatron's own `qk_l2_norm` would norm every layer, so each layer has its own spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_rl.models.base import GATED, ROW, Architecture
from megatron_rl.models.mapping import Transposed, Weight

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


class Llama4(Architecture):
    """`model_type` "llama4_text"."""

    interleaved_rope = True
    rope_theta = 500000.0

    def __init__(self, hf: Mapping[str, Any]) -> None:
        super().__init__(hf)
        self.require("num_experts_per_tok", 1)
        every = int(hf.get("no_rope_layer_interval", 4))
        default_rope = [int((i + 1) % every != 0) for i in range(self.layers)]
        self.rope: list[int] = [int(x) for x in hf.get("no_rope_layers") or default_rope]
        step = int(hf.get("interleave_moe_layer_step", 1))
        moe = hf.get("moe_layers")
        self.moe_layers = set(range(step - 1, self.layers, step) if moe is None else moe)
        self.qk_norm = bool(hf.get("use_qk_norm", True))
        self.chunk: int | None = hf.get("attention_chunk_size", 8192)
        self.temperature: tuple[float, float] | None = None
        if hf.get("attn_temperature_tuning", True):
            self.temperature = (
                float(hf.get("floor_scale", 8192)),
                float(hf.get("attn_scale", 0.1)),
            )
        if len(self.rope) != self.layers:
            raise ValueError(
                f"config.json has {len(self.rope)} no_rope_layers for {self.layers} layers: one"
                " entry per layer is needed"
            )
        self.expert_feed_forward = int(hf["intermediate_size"])
        self.feed_forward = int(hf.get("intermediate_size_mlp", self.expert_feed_forward))
        """Width of the MLP of a layer without experts."""

    @property
    def experts(self) -> int:
        return int(self.hf["num_local_experts"]) if self.moe_layers else 0

    def config_fields(self) -> dict[str, Any]:
        fields = super().config_fields()
        size = self.expert_feed_forward
        # Megatron marks NoPE layers with 1, transformers RoPE layers.
        fields["no_rope_freq"] = [1 - rope for rope in self.rope]
        fields["qk_l2_norm"] = self.qk_norm
        fields["ffn_hidden_size"] = self.feed_forward
        if self.moe_layers:
            fields |= {
                "num_moe_experts": self.experts,
                "moe_layer_freq": [int(i in self.moe_layers) for i in range(self.layers)],
                "moe_ffn_hidden_size": size,
                "moe_shared_expert_intermediate_size": size,
                "moe_router_topk": 1,
                "moe_router_score_function": "sigmoid",
                "moe_router_dtype": "fp32",
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.0,
                "moe_apply_probs_on_input": True,
            }
        return fields

    def layer_specs(self, use_te: bool) -> list[ModuleSpec]:
        from megatron_rl.models import specs

        return [
            specs.layer(
                use_te,
                experts=self.experts if i in self.moe_layers else 0,
                qk_l2_norm=self.qk_norm and bool(rope),
                chunk=self.chunk if rope else None,
                temperature=None if rope else self.temperature,
            )
            for i, rope in enumerate(self.rope)
        ]

    def layer_weights(self, layer: int) -> list[Weight]:
        if layer not in self.moe_layers:
            return self.dense_mlp_weights(layer, "feed_forward", self.feed_forward)
        m, h = self.names(layer)
        mlp, ff, size = m + "mlp.", h + "feed_forward.", self.expert_feed_forward
        out = [
            self.mlp_norm_weight(layer, dense=False),
            Weight(mlp + "router.weight", (ff + "router.weight",), (self.experts, self.hidden)),
        ]
        for linear, name, shape, split in (
            ("linear_fc1", "gate_up_proj", (2 * size, self.hidden), GATED),
            ("linear_fc2", "down_proj", (self.hidden, size), ROW),
        ):
            out += [
                Weight(
                    f"{mlp}experts.local_experts.{e}.{linear}.weight",
                    (f"{ff}experts.{name}",),
                    shape,
                    Transposed(),
                    split,
                    expert=e,
                    index=e,
                )
                for e in range(self.experts)
            ]
        return out + self.gated_weights(mlp + "shared_experts", ff + "shared_expert", size)


class Llama4Multimodal(Llama4):
    """`model_type` "llama4": the text model of `text_config`, beside a vision tower.

    Args:
        hf: contents of `config.json`.

    Raises:
        ValueError: no `text_config`, or a feature of it that is not implemented.
    """

    prefix = "language_model."
    untrained = ("vision_model.", "multi_modal_projector.")

    def __init__(self, hf: Mapping[str, Any]) -> None:
        if not isinstance(hf.get("text_config"), Mapping):
            raise ValueError(
                "config.json has model_type 'llama4' and no text_config: its multimodal checkpoint"
                " has one; for a text model alone set model_type to 'llama4_text'"
            )
        super().__init__(hf["text_config"])
