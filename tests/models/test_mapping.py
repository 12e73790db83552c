"""Packing and sharding move elements and lose none, for every tensor-parallel size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.models import architecture, tiny
from megatron_rl.models.mapping import (
    GATE_UP,
    TRANSPOSED,
    UNCHANGED,
    Along,
    Split,
    VocabularyRows,
    Weight,
    local_name,
    padded_vocabulary,
    query_key_value,
    transformer_engine_name,
)


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([2, 3]))
def test_query_key_value_round_trip(groups: int, queries: int, head: int) -> None:
    pack = query_key_value(groups, head)
    rows = [groups * queries * head, groups * head, groups * head]
    tensors = [numbered(n, 5) + 1000 * i for i, n in enumerate(rows)]
    full = pack.to_megatron(tensors)
    assert full.shape == (sum(rows), 5)
    assert all(torch.equal(a, b) for a, b in zip(pack.to_huggingface(full), tensors, strict=True))
    # Group g's block starts with its queries: that is how a group stays on one rank.
    block = full.view(groups, -1, 5)[-1]
    assert torch.equal(block[: queries * head], tensors[0][-queries * head :])
    assert torch.equal(block[-head:], tensors[2][-head:])


def test_gate_and_up_are_split_separately() -> None:
    gate, up = numbered(4, 3), numbered(4, 3) + 100
    full = GATE_UP.to_megatron([gate, up])
    shard = Along(0, parts=2).shard(full, 1, 2)
    assert torch.equal(shard, torch.cat([gate[2:], up[2:]]))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "split", [Split(), Along(0), Along(1), Along(0, parts=2), VocabularyRows(8), VocabularyRows(7)]
)
def test_shards_round_trip(split: Split, size: int) -> None:
    full = numbered(7 if split == VocabularyRows(7) else 8, 8)
    shards = [split.shard(full, rank, size) for rank in range(size)]
    assert len({s.shape for s in shards}) == 1
    assert torch.equal(split.unshard(shards), full)


def test_the_other_packs_round_trip() -> None:
    matrix = numbered(2, 3)
    assert torch.equal(UNCHANGED.to_huggingface(UNCHANGED.to_megatron([matrix]))[0], matrix)
    assert torch.equal(TRANSPOSED.to_megatron([matrix]), matrix.t())
    assert torch.equal(TRANSPOSED.to_huggingface(TRANSPOSED.to_megatron([matrix]))[0], matrix)
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


EXPERT = Weight(
    "decoder.layers.13.mlp.experts.local_experts.5.linear_fc1.weight",
    ("gate", "up"),
    (12, 4),
    GATE_UP,
    Along(0, parts=2),
    expert=5,
)


def test_a_parameter_has_the_numbers_of_its_layer_and_expert_within_the_module() -> None:
    assert EXPERT.layer == 13
    te, local = EXPERT.parameter(True, 12, 4), EXPERT.parameter(False, 12, 4)
    assert te == "decoder.layers.1.mlp.experts.linear_fc1.weight1"
    assert local == "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"
    norm = Weight("decoder.layers.3.pre_dense_layernorm.weight", ("norm",), (4,))
    assert norm.parameter(True, 2) == "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    assert norm.parameter(False, 2) == "decoder.layers.1.pre_mlp_layernorm.weight"
    final = Weight("decoder.final_layernorm.weight", ("norm",), (4,))
    assert final.layer is None
    assert final.parameter(True, 8) == final.megatron


def test_shapes_of_parts_and_shards_follow_from_the_whole() -> None:
    assert EXPERT.elements == 48
    assert EXPERT.hf_shapes() == [(6, 4), (6, 4)]
    assert EXPERT.shard_shape(2) == (6, 4)
    qkv = Weight("qkv", ("q", "k", "v"), (32, 5), query_key_value(2, 4), Along(0))
    assert qkv.hf_shapes() == [(16, 5), (8, 5), (8, 5)]
    down = Weight("down", ("down",), (6, 4), TRANSPOSED, Along(1))
    assert down.hf_shapes() == [(4, 6)]
    assert down.shard_shape(4) == (6, 1)
    table = Weight("table", ("table",), (7, 3), split=VocabularyRows(7))
    assert [table.shard_shape(n) for n in (1, 2, 4)] == [(7, 3), (4, 3), (2, 3)]
    assert table.hf_shapes() == [(7, 3)]


TE_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
}
TE_HEADS = {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
TE_DENSE = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
TE_EXPERTS = {"pre_mlp_layernorm.weight", "mlp.router.weight"} | {
    f"mlp.experts.linear_fc{i}.weight{e}" for i in (1, 2) for e in range(4)
}
TE_SHARED = {"mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("tiny_dense", TE_LAYER | TE_DENSE),
        ("tiny_qwen3", TE_LAYER | TE_HEADS | TE_DENSE),
        ("tiny_qwen3_moe", TE_LAYER | TE_HEADS | TE_EXPERTS),
        ("tiny_scout", TE_LAYER | TE_EXPERTS | TE_SHARED),
    ],
)
def test_names_of_a_layer_of_transformer_engine(name: str, layer: set[str]) -> None:
    weights = architecture(tiny.CONFIGS[name]).weights()
    own = {w.parameter(use_te=True, first_layer=1) for w in weights if w.layer == 1}
    assert own == {f"decoder.layers.0.{x}" for x in layer}
    dense = architecture({**tiny.CONFIGS["tiny_qwen3_moe"], "mlp_only_layers": [1]}).weights()
    own = {w.parameter(use_te=True) for w in dense if w.layer == 1}
    assert own == {f"decoder.layers.1.{x}" for x in TE_LAYER | TE_HEADS | TE_DENSE}
