"""Layers with attention in packed, chunked and context-parallel rows. Imports Megatron.

Core attentions and rotary angles follow from `packing.Rows`, which Megatron passes to every
attention as its packed-sequence parameters. No layer needs a mask.

Shape legend: s positions of this rank, b rows, n heads, g key-value heads, d head size; S positions
of a row over all context-parallel ranks.
"""

import functools
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_rl.models.packing import Rows, pieces


class Rotary(torch.nn.Module):
    """Rotary angles at given positions, in place of Megatron's multimodal rotary embedding.

    Megatron's ordinary embedding is by index, but positions restart in packed rows and have gaps in
    context-parallel ones. `inverse_frequencies` are fp32 [d / 2]; `interleaved` pairs are adjacent,
    not halves of the head.
    """

    def __init__(self, inverse_frequencies: Tensor, interleaved: bool) -> None:
        super().__init__()
        self.inv_freq = inverse_frequencies  # not a buffer: Megatron would convert it to bf16
        self.interleaved = interleaved

    def forward(self, position_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the angles [s, 1, 1, d] of positions [b, s]; all rows have those of the first."""
        angles_sd = torch.outer(position_ids[0].to(self.inv_freq.dtype), self.inv_freq)
        if self.interleaved:
            angles_sd = angles_sd.repeat_interleave(2, dim=1)
        else:
            angles_sd = torch.cat([angles_sd, angles_sd], dim=1)
        return angles_sd[:, None, None, :]


def _scaled(query_sbnd: Tensor, rows: Rows, temperature: tuple[float, float] | None) -> Tensor:
    """Multiply by Llama 4's query scale, computed in fp32 (attention temperature tuning)."""
    if temperature is None or rows.longest < temperature[0]:
        return query_sbnd  # the scale is 1 everywhere
    floor_scale, attn_scale = temperature
    steps_s = torch.floor((rows.positions_s.float() + 1.0) / floor_scale)
    scale_s = torch.log1p(steps_s) * attn_scale + 1.0
    return (query_sbnd * scale_s.view(-1, 1, 1, 1)).to(query_sbnd.dtype)


class CausalAttention(torch.nn.Module):
    """Causal attention by torch's fused kernels, in a loop over sequences and chunks.

    The loop costs little: forward and backward of 64 sequences of 45 tokens take 5.2 ms on a core,
    4.6 ms as a batch padded to 60, 100 ms with a block-diagonal mask. Under context parallelism
    keys and values are gathered from the other ranks, and backward sums their gradients there.

    Positions attend within aligned chunks of size `chunk` of their sequence, or within all of it.
    `temperature` is (floor_scale, attn_scale) of the query scale. Megatron gives the rest.
    """

    def __init__(
        self,
        config: Any,
        *,
        chunk: int | None = None,
        temperature: tuple[float, float] | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.chunk, self.temperature, self.scale = chunk, temperature, softmax_scale

    def forward(
        self,
        query_sbnd: Tensor,
        key_sbgd: Tensor,
        value_sbgd: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Rows | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the context [s, b, n * d]; without `packed_seq_params` a row is one sequence."""
        s, b = query_sbnd.shape[:2]
        rank, size = (self.group.rank(), self.group.size()) if self.group else (0, 1)
        rows = packed_seq_params or Rows.of_bounds((0, s * size), rank, size, query_sbnd.device)
        query_sbnd = _scaled(query_sbnd, rows, self.temperature)
        cut = pieces(rows.bounds, self.chunk, rank, size, rows.continues)
        if cut.slots is not None:
            both = torch.cat([key_sbgd, value_sbgd], dim=-1)
            if self.group is not None:
                both = gather_from_sequence_parallel_region(both, group=self.group)
            both = both.index_select(0, rows.slots(self.chunk, cut))
            key_sbgd, value_sbgd = both.chunk(2, dim=-1)
        lengths = (cut.queries, cut.keys, cut.keys)
        parts = (
            x.permute(1, 2, 0, 3).split(n, dim=2)
            for x, n in zip((query_sbnd, key_sbgd, value_sbgd), lengths, strict=True)
        )
        context_bnsd = [self._attend(*part) for part in zip(*parts, strict=True)]
        joined = context_bnsd[0] if len(context_bnsd) == 1 else torch.cat(context_bnsd, dim=2)
        return joined.permute(2, 0, 1, 3).reshape(s, b, -1)

    def _attend(self, query_bnqd: Tensor, key_bgkd: Tensor, value_bgkd: Tensor) -> Tensor:
        queries, keys = query_bnqd.shape[2], key_bgkd.shape[2]
        return torch.nn.functional.scaled_dot_product_attention(
            query_bnqd,
            key_bgkd,
            value_bgkd,
            attn_mask=None if queries == keys else causal_lower_right(queries, keys),
            is_causal=queries == keys,
            scale=self.scale,
            enable_gqa=key_bgkd.shape[1] != query_bnqd.shape[1],
        )


def te_attention(chunk: int | None, temperature: tuple[float, float] | None) -> type:
    """Return a class of Transformer Engine's attention for `Rows`, chunks and the query scale.

    All rows take its `thd` format: it needs no mask, and cuDNN plans it for ranges of lengths; each
    length of `sbhd` costs a plan. Its context parallelism has no chunks: there, `CausalAttention`
    attends sequences longer than a chunk.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class RowsTEAttention(TEDotProductAttention):  # type: ignore[misc, unused-ignore]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            self._rank = kwargs["pg_collection"].cp.rank()
            self._by_torch = None
            if chunk is not None and config.context_parallel_size > 1:
                self._by_torch = CausalAttention(
                    config, chunk=chunk, temperature=temperature, **kwargs
                )

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            packed_seq_params: Rows | None = None,
            **kwargs: Any,
        ) -> Tensor:
            (s, b), size = query.shape[:2], self.config.context_parallel_size
            bounds = (0, s * size)
            rows = packed_seq_params or Rows.of_bounds(bounds, self._rank, size, query.device)
            if chunk is not None and self._by_torch is not None and rows.longest > chunk:
                return self._by_torch(query, key, value, packed_seq_params=rows)
            query = _scaled(query, rows, temperature)
            query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
            kwargs["packed_seq_params"] = rows.thd(chunk, b)
            context = super().forward(query, key, value, attention_mask, **kwargs)
            return context.view(b, s, -1).transpose(0, 1).contiguous()

    return RowsTEAttention


def layer_spec(
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
