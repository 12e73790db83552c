"""Qwen3, dense: Llama's shape, and an RMS norm of each head's query and key before the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_rl.models.llama import Llama
from megatron_rl.models.mapping import Weight

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


class Qwen3(Llama):
    """`model_type` "qwen3"."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        super().__init__(hf)
        self.require("use_sliding_window", False)

    def config_fields(self) -> dict[str, Any]:
        return {**super().config_fields(), "qk_layernorm": True}

    def layer_specs(self, use_te: bool) -> list[ModuleSpec]:
        from megatron_rl.models import specs

        return [specs.layer(use_te, qk_norm=True) for _ in range(self.layers)]

    def layer_weights(self, layer: int) -> list[Weight]:
        return self.head_norm_weights(layer) + super().layer_weights(layer)
