"""Packing and cutting move elements and lose none, for every tensor-parallel size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.models.mapping import (
    Along,
    GateUp,
    QueryKeyValue,
    Same,
    Split,
    Transposed,
    VocabularyRows,
    Whole,
    local_name,
    padded_vocabulary,
    transformer_engine_name,
)


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([2, 3]))
def test_query_key_value_round_trip(groups: int, queries: int, head: int) -> None:
    pack = QueryKeyValue(groups, head)
    rows = [groups * queries * head, groups * head, groups * head]
    tensors = [numbered(n, 5) + 1000 * i for i, n in enumerate(rows)]
    full = pack.join(tensors)
    assert full.shape == (sum(rows), 5)
    assert all(torch.equal(a, b) for a, b in zip(pack.part(full), tensors, strict=True))
    # Group g's block starts with its queries: that is how a group stays on one rank.
    block = full.view(groups, -1, 5)[-1]
    assert torch.equal(block[: queries * head], tensors[0][-queries * head :])
    assert torch.equal(block[-head:], tensors[2][-head:])


def test_gate_and_up_are_cut_alike() -> None:
    gate, up = numbered(4, 3), numbered(4, 3) + 100
    full = GateUp().join([gate, up])
    shard = Along(0, parts=2).cut(full, 1, 2)
    assert torch.equal(shard, torch.cat([gate[2:], up[2:]]))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "split", [Whole(), Along(0), Along(1), Along(0, parts=2), VocabularyRows(8), VocabularyRows(7)]
)
def test_cut_and_paste_round_trip(split: Split, size: int) -> None:
    full = numbered(7 if split == VocabularyRows(7) else 8, 8)
    shards = [split.cut(full, rank, size) for rank in range(size)]
    assert len({s.shape for s in shards}) == 1
    assert torch.equal(split.paste(shards), full)


def test_the_other_packs_round_trip() -> None:
    matrix = numbered(2, 3)
    assert torch.equal(Same().part(Same().join([matrix]))[0], matrix)
    assert torch.equal(Transposed().join([matrix]), matrix.t())
    assert torch.equal(Transposed().part(Transposed().join([matrix]))[0], matrix)
    assert [padded_vocabulary(7, n) for n in (1, 2, 4)] == [7, 8, 8]


@pytest.mark.parametrize(
    ("name", "local", "te"),
    [
        (
            "decoder.layers.3.input_layernorm.weight",
            "decoder.layers.3.input_layernorm.weight",
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "decoder.layers.3.pre_dense_layernorm.weight",
            "decoder.layers.3.pre_mlp_layernorm.weight",
            "decoder.layers.3.mlp.linear_fc1.layer_norm_weight",
        ),
        (
            "decoder.layers.3.pre_mlp_layernorm.weight",
            "decoder.layers.3.pre_mlp_layernorm.weight",
            "decoder.layers.3.pre_mlp_layernorm.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight",
            "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight",
            "decoder.layers.3.mlp.experts.linear_fc1.weight5",
        ),
        ("output_layer.weight", "output_layer.weight", "output_layer.weight"),
    ],
)
def test_names_in_both_specs(name: str, local: str, te: str) -> None:
    assert local_name(name) == local
    assert transformer_engine_name(name) == te
