"""Qwen3, dense: Llama's shape, and an RMS norm of each head's query and key before the rotation."""

from collections.abc import Mapping
from typing import Any, override

from megatron_rl.models.llama import Llama
from megatron_rl.models.mapping import Weight


class Qwen3(Llama):
    """`model_type` "qwen3"."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        super().__init__(hf)
        self.require("use_sliding_window", False)

    @override
    def config_fields(self) -> dict[str, Any]:
        return {**super().config_fields(), "qk_layernorm": True}

    @override
    def layer_options(self, layer: int) -> dict[str, Any]:
        return {**super().layer_options(layer), "qk_norm": True}

    @override
    def layer_weights(self, layer: int) -> list[Weight]:
        return self.head_norm_weights(layer) + super().layer_weights(layer)
