"""Layer specs that the tests give to a script by --spec."""

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from megatron_rl.models.attention import CausalAttention


class HalfScale(DotProductAttention):
    """Attention with half the softmax scale, which no config.json can say."""

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super().forward(query / 2, *args, **kwargs)
        return output


def context_parallel(config: Any, vp_stage: int | None = None) -> Any:
    """Return the block with this project's attention: Megatron's needs Transformer Engine."""
    block = get_gpt_decoder_block_spec(
        getattr(config, "transformer", config), False, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return block


half_scale = get_gpt_layer_local_spec(normalization="RMSNorm")
half_scale.submodules.self_attention.submodules.core_attention = HalfScale
