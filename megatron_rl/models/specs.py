"""Layer specs of Megatron-Core, with the core attentions that it lacks. Imports Megatron.

Shape legend: s positions, b sequences, n heads of this rank, d head size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


def temperature_scale(positions: Tensor, floor_scale: float, attn_scale: float) -> Tensor:
    """Llama 4's query scale at these positions, fp32 (attention temperature tuning)."""
    steps = torch.floor((positions.float() + 1.0) / floor_scale)
    return torch.log1p(steps) * attn_scale + 1.0


def chunked_mask(positions: Tensor, chunk: int) -> Tensor:
    """True where attention is forbidden [s, s]: the future, and other aligned chunks."""
    query, key = positions[:, None], positions[None, :]
    return (key > query) | (key // chunk != query // chunk)


class CausalAttention(torch.nn.Module):
    """Causal attention by torch's fused kernel, with Llama 4's chunks and query temperature.

    A row of the batch is one sequence that starts at position 0 and is padded on the right, so
    that positions are indices and causality alone keeps padding out. Chunks and temperature cost
    nothing while the row is shorter than `chunk` and `floor_scale`.

    Args:
        chunk: positions see each other within aligned chunks of this size; None: all earlier ones.
        temperature: (floor_scale, attn_scale) of the query scale; None: no scale.
    """

    def __init__(
        self,
        config: Any,
        *,
        chunk: int | None = None,
        temperature: tuple[float, float] | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.context_parallel_size != 1:
            raise ValueError(
                f"parallel.context is {config.context_parallel_size}: the local attention needs 1"
                " (context parallelism comes with Transformer Engine)"
            )
        self.chunk, self.temperature, self.scale = chunk, temperature, softmax_scale

    def forward(
        self,
        query_sbnd: Tensor,
        key_sbnd: Tensor,
        value_sbnd: Tensor,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The context [s, b, n * d]."""
        s, b = query_sbnd.shape[:2]
        positions = torch.arange(s, device=query_sbnd.device)
        if self.temperature is not None and s >= self.temperature[0]:
            scale = temperature_scale(positions, *self.temperature)
            query_sbnd = (query_sbnd * scale.view(-1, 1, 1, 1)).to(query_sbnd.dtype)
        allowed = None
        if self.chunk is not None and s > self.chunk:
            allowed = ~chunked_mask(positions, self.chunk)
        context_bnsd = torch.nn.functional.scaled_dot_product_attention(
            query_sbnd.permute(1, 2, 0, 3),
            key_sbnd.permute(1, 2, 0, 3),
            value_sbnd.permute(1, 2, 0, 3),
            attn_mask=allowed,
            is_causal=allowed is None,
            scale=self.scale,
            enable_gqa=key_sbnd.shape[2] != query_sbnd.shape[2],
        )
        return context_bnsd.permute(2, 0, 1, 3).reshape(s, b, -1)


def te_attention(chunk: int | None, temperature: tuple[float, float] | None) -> type:
    """Transformer Engine's attention with the query temperature; refuses rows beyond the chunk."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class Llama4TEAttention(TEDotProductAttention):
        def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            s = query.shape[0] * self.config.context_parallel_size
            if chunk is not None and s > chunk:
                raise NotImplementedError(
                    f"a row of {s} tokens exceeds attention_chunk_size = {chunk}: chunked attention"
                    " on Transformer Engine is not implemented; lower the sequence length"
                )
            if temperature is not None and s >= temperature[0]:
                if self.config.context_parallel_size > 1:
                    raise NotImplementedError(
                        "attention temperature tuning with parallel.context > 1 is not implemented"
                    )
                positions = torch.arange(s, device=query.device)
                scale = temperature_scale(positions, *temperature)
                query = (query * scale.view(-1, 1, 1, 1)).to(query.dtype)
            return super().forward(query, *args, **kwargs)

    return Llama4TEAttention


def layer(
    use_te: bool,
    *,
    experts: int = 0,
    qk_l2_norm: bool = False,
    chunk: int | None = None,
    temperature: tuple[float, float] | None = None,
) -> ModuleSpec:
    """The spec of one layer: pre-norm, attention, dense MLP or mixture of experts."""
    if use_te:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts or None, moe_grouped_gemm=bool(experts), qk_l2_norm=qk_l2_norm
        )
        if chunk is not None or temperature is not None:
            attention: Any = te_attention(chunk, temperature)
            spec.submodules.self_attention.submodules.core_attention = attention
        return spec
    spec = get_gpt_layer_local_spec(
        num_experts=experts or None, qk_l2_norm=qk_l2_norm, normalization="RMSNorm"
    )
    attention = functools.partial(CausalAttention, chunk=chunk, temperature=temperature)
    spec.submodules.self_attention.submodules.core_attention = attention
    return spec


def final_norm(use_te: bool) -> Any:
    """The norm after the last layer."""
    if use_te:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return WrappedTorchNorm
