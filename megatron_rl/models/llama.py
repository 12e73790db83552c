"""Llama 1 to 3 and models of the same shape: pre-norm, grouped-query attention, SwiGLU, RoPE."""

from typing import override

from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight


class Llama(Architecture):
    """`model_type` "llama"."""

    @override
    def layer_weights(self, layer: int) -> list[Weight]:
        return self.dense_mlp_weights(layer, "mlp", self.feed_forward)
