"""Llama 1 to 3 and models of the same shape: pre-norm, grouped-query attention, SwiGLU, RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


class Llama(Architecture):
    """`model_type` "llama"."""

    @property
    def feed_forward(self) -> int:
        """Width of a layer's MLP."""
        return int(self.hf["intermediate_size"])

    def config_fields(self) -> dict[str, Any]:
        return {**super().config_fields(), "ffn_hidden_size": self.feed_forward}

    def layer_specs(self, use_te: bool) -> list[ModuleSpec]:
        from megatron_rl.models import specs

        return [specs.layer(use_te) for _ in range(self.layers)]

    def layer_weights(self, layer: int) -> list[Weight]:
        return self.dense_mlp_weights(layer, "mlp", self.feed_forward)
