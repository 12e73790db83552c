"""Layer specs of Megatron-Core, with the core attentions of `attention`. Imports Megatron."""

import functools
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_rl.models.attention import CausalAttention, te_attention


def layer(
    use_te: bool,
    *,
    experts: int = 0,
    qk_norm: bool = False,
    qk_l2_norm: bool = False,
    chunk: int | None = None,
    temperature: tuple[float, float] | None = None,
) -> ModuleSpec:
    """Return the spec of one layer: pre-norm, attention, dense MLP or mixture of experts."""
    options = {"num_experts": experts or None, "qk_layernorm": qk_norm, "qk_l2_norm": qk_l2_norm}
    if use_te:
        grouped = bool(experts)
        spec = get_gpt_layer_with_transformer_engine_spec(**options, moe_grouped_gemm=grouped)
        attention: Any = te_attention(chunk, temperature)
    else:
        spec = get_gpt_layer_local_spec(**options, normalization="RMSNorm")
        attention = functools.partial(CausalAttention, chunk=chunk, temperature=temperature)
    spec.submodules.self_attention.submodules.core_attention = attention
    return spec


def final_norm(use_te: bool) -> Any:
    """Return the class of the norm after the last layer."""
    if use_te:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return WrappedTorchNorm
