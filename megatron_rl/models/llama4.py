"""Llama 4 (Scout, Maverick): mixture of experts with RoPE and NoPE layers.

Facts on which the code of Meta and transformers agrees, with Megatron's settings:

- Router: sigmoid of the top-1 logit, multiplied onto the expert's *input*
  (`moe_apply_probs_on_input`); a shared expert is added; no auxiliary loss in RL.
- RoPE layers (`no_rope_layers[i] == 1`): interleaved rotary pairs, then L2 norm of query and key
  (`use_qk_norm`), attention within aligned chunks of `attention_chunk_size` positions.
- NoPE layers: no rotation, no norm, full causal attention, and queries scaled by
  `1 + attn_scale * log(1 + floor((position + 1) / floor_scale))`.
- Megatron's own `qk_l2_norm` would norm every layer, so each layer has its own spec.
"""

from collections.abc import Mapping
from typing import Any, override

from megatron_rl.models.base import GATED, ROW, Architecture
from megatron_rl.models.mapping import TRANSPOSED, Weight


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
            scales = hf.get("floor_scale", 8192), hf.get("attn_scale", 0.1)
            self.temperature = (float(scales[0]), float(scales[1]))
        if len(self.rope) != self.layers:
            raise ValueError(
                f"config.json has {len(self.rope)} no_rope_layers for {self.layers} layers: one"
                " entry per layer is needed"
            )
        self.experts = int(hf["num_local_experts"]) if self.moe_layers else 0
        self.expert_feed_forward = self.feed_forward
        self.feed_forward = int(hf.get("intermediate_size_mlp", self.expert_feed_forward))

    @override
    def config_fields(self) -> dict[str, Any]:
        fields = super().config_fields()
        # Megatron marks NoPE layers with 1, transformers RoPE layers.
        fields["no_rope_freq"] = [1 - rope for rope in self.rope]
        fields["qk_l2_norm"] = self.qk_norm
        if self.moe_layers:
            fields["moe_shared_expert_intermediate_size"] = self.expert_feed_forward
            fields["moe_router_score_function"] = "sigmoid"
            fields["moe_apply_probs_on_input"] = True
        return fields

    @override
    def layer_options(self, layer: int) -> dict[str, Any]:
        options = super().layer_options(layer)
        if not self.rope[layer]:
            return {**options, "temperature": self.temperature}
        return {**options, "qk_l2_norm": self.qk_norm, "chunk": self.chunk}

    @override
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
            hf = (f"{ff}experts.{name}",)
            for e in range(self.experts):
                megatron = f"{mlp}experts.local_experts.{e}.{linear}.weight"
                out.append(Weight(megatron, hf, shape, TRANSPOSED, split, expert=e, index=e))
        return out + self.gated_weights(mlp + "shared_experts", ff + "shared_expert", size)


class Llama4Multimodal(Llama4):
    """`model_type` "llama4": the text model of `text_config`; the vision tower is not trained."""

    prefix = "language_model."
    untrained = ("vision_model.", "multi_modal_projector.")

    def __init__(self, hf: Mapping[str, Any]) -> None:
        if not isinstance(hf.get("text_config"), Mapping):
            raise ValueError(
                "config.json has model_type 'llama4' and no text_config: a multimodal checkpoint"
                " has one; for a text model set model_type to 'llama4_text'"
            )
        super().__init__(hf["text_config"])
