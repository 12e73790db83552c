"""Packed, chunked, scaled and context-parallel attention equals masked attention in float64.

Not exercised: Transformer Engine's kernels (a stand-in takes their place) and the collectives of
context parallelism (`tests/trainer/test_layouts.py` has them, over gloo).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.models import attention
from megatron_rl.models.attention import CausalAttention, Rotary, Rows, te_attention
from megatron_rl.models.packing import Bounds, own_positions, within_sequence

HEADS, GROUPS, SIZE = 4, 2, 8
TEMPERATURE = (3.0, 0.7)
SHORT, LONG = (0, 4, 24, 28, 40), (0, 24)
CASES = [
    pytest.param(bounds, rows, chunk, temperature, id=f"{name}, chunk {chunk}, {temperature}")
    for name, bounds, rows in (("packed", SHORT, 1), ("padded", LONG, 3))
    for chunk, temperature in ((None, None), (5, None), (7, TEMPERATURE), (100, TEMPERATURE))
]


def inputs(bounds: Bounds, rows: int) -> list[Tensor]:
    """Query, key and value [S, b, n, d] in float64."""
    rng = torch.Generator().manual_seed(7)
    shapes = ((bounds[-1], rows, n, SIZE) for n in (HEADS, GROUPS, GROUPS))
    return [torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes]


def reference(
    bounds: Bounds, qkv: list[Tensor], chunk: int | None, temperature: tuple[float, float] | None
) -> Tensor:
    """Compute the same from the definition: a mask and a softmax, head by head."""
    query, key, value = (x.permute(1, 2, 0, 3) for x in qkv)
    at = np.arange(bounds[-1])
    inside = within_sequence(bounds, at)
    start = at - inside + (inside // chunk * chunk if chunk else 0)
    allowed = torch.from_numpy((at[None, :] <= at[:, None]) & (at[None, :] >= start[:, None]))
    if temperature is not None:
        floor, scale = temperature
        steps = torch.from_numpy(np.floor((inside + 1.0) / floor)).float()
        query = query * (steps.log1p() * scale + 1.0)[:, None]  # fp32, as transformers does
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) / SIZE**0.5).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ value).permute(2, 0, 1, 3).flatten(2)


def with_gradients(context: Tensor, qkv: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1.0, 1.0, context.numel(), dtype=context.dtype).view(context.shape)
    return [context.detach(), *torch.autograd.grad((context * weights).sum(), qkv)]


def leaves(tensors: list[Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [x.to(dtype).clone().requires_grad_() for x in tensors]


def groups(rank: int, size: int) -> Any:
    return SimpleNamespace(cp=SimpleNamespace(rank=lambda: rank, size=lambda: size))


def rows_of(bounds: Bounds, rank: int = 0, size: int = 1) -> Rows:
    return Rows.of_bounds(bounds, rank, size, torch.device("cpu"))


@pytest.mark.parametrize(("bounds", "rows", "chunk", "temperature"), CASES)
def test_equals_masked_attention(
    bounds: Bounds, rows: int, chunk: int | None, temperature: tuple[float, float] | None
) -> None:
    config = SimpleNamespace(context_parallel_size=1)
    module = CausalAttention(config, chunk=chunk, temperature=temperature)
    qkv = inputs(bounds, rows)
    exact, own = leaves(qkv), leaves(qkv, torch.float32)
    want = with_gradients(reference(bounds, exact, chunk, temperature), exact)
    given = None if len(bounds) == 2 else rows_of(bounds)  # default: rows are sequences
    got = with_gradients(module(*own, packed_seq_params=given), own)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("bounds", "rows", "chunk", "temperature"), CASES)
def test_context_parallel_ranks_together_equal_masked_attention(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    bounds: Bounds,
    rows: int,
    chunk: int | None,
    temperature: tuple[float, float] | None,
) -> None:
    bounds = tuple(size * 3 * b // 4 * 2 for b in bounds)
    config = SimpleNamespace(context_parallel_size=size)
    qkv, own = inputs(bounds, rows), [own_positions(bounds, r, size) for r in range(size)]
    exact, shared = leaves(qkv), leaves(qkv)
    want = with_gradients(reference(bounds, exact, chunk, temperature), exact)

    joined = torch.cat([x[np.concatenate(own)] for x in shared[1:]], dim=-1)
    monkeypatch.setattr(
        attention, "gather_from_sequence_parallel_region", lambda both, group: joined
    )
    context = torch.zeros_like(want[0])
    for rank in range(size):
        module = CausalAttention(
            config, chunk=chunk, temperature=temperature, pg_collection=groups(rank, size)
        )
        parts = [x[own[rank]] for x in shared]
        context[own[rank]] = module(*parts, packed_seq_params=rows_of(bounds, rank, size))
    for a, b in zip(with_gradients(context, shared), want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)


class StandInForTE(torch.nn.Module):
    """`TEDotProductAttention`: thd by cu_seqlens, causal, no mask."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.seen: list[Any] = []

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        assert attention_mask is None
        self.seen.append(packed_seq_params)
        assert packed_seq_params.qkv_format == "thd"
        bounds: Bounds = tuple(packed_seq_params.cu_seqlens_q.tolist())
        assert packed_seq_params.max_seqlen_q == int(np.diff(bounds).max())
        return reference(bounds, [x[:, None] for x in (query, key, value)], None, None)[:, 0]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.extensions import transformer_engine

    monkeypatch.setattr(transformer_engine, "TEDotProductAttention", StandInForTE)


@pytest.mark.parametrize(("bounds", "rows", "chunk", "temperature"), CASES)
def test_transformer_engine_is_given_refined_sequences_in_place_of_masks(
    stand_in: None,
    bounds: Bounds,
    rows: int,
    chunk: int | None,
    temperature: tuple[float, float] | None,
) -> None:
    config = SimpleNamespace(context_parallel_size=1)
    module: Any = te_attention(chunk, temperature)(config, pg_collection=groups(0, 1))
    qkv = inputs(bounds, rows)
    exact, own = leaves(qkv), leaves(qkv)
    want = with_gradients(reference(bounds, exact, chunk, temperature), exact)
    got = with_gradients(module(*own, None, packed_seq_params=rows_of(bounds)), own)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)


def test_transformer_engine_divides_sequences_over_ranks_and_torch_the_chunks(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds, size = (0, 8, 24), 2
    config = SimpleNamespace(context_parallel_size=size)
    asked: list[Any] = []
    monkeypatch.setattr(
        CausalAttention, "forward", lambda self, *_, packed_seq_params: asked.append(self.chunk)
    )
    qkv = [x[own_positions(bounds, 0, size)] for x in inputs(bounds, 1)]
    for chunk, by_torch in ((None, []), (16, []), (15, [15])):
        module: Any = te_attention(chunk, None)(config, pg_collection=groups(0, size))
        monkeypatch.setattr(
            StandInForTE, "forward", lambda self, q, *_, **kw: self.seen.append(kw) or q.flatten(1)
        )
        module(*qkv, None, packed_seq_params=rows_of(bounds, 0, size))
        assert asked == by_torch
        if not by_torch:  # whole sequences, over all ranks
            (given,) = module.seen
            assert given["packed_seq_params"].cu_seqlens_q.tolist() == [0, 8, 24]
            assert given["packed_seq_params"].cu_seqlens_q_padded.tolist() == [0, 8, 24]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_angles_are_those_of_the_given_positions(interleaved: bool) -> None:
    frequencies = torch.tensor([1.0, 0.5])
    angles = Rotary(frequencies, interleaved)(torch.tensor([[0, 1, 2, 0, 7]]))
    assert angles.shape == (5, 1, 1, 4)
    seven = [7.0, 7.0, 3.5, 3.5] if interleaved else [7.0, 3.5, 7.0, 3.5]
    assert angles[4].flatten().tolist() == seven
    assert (angles[3] == angles[0]).all()
