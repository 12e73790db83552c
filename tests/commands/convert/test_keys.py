"""Names and positions in a checkpoint are those that Megatron itself requests.

Not exercised: Transformer Engine's modules, which need CUDA. Their keys are the names of their
parameters (experts aside), and these are compared.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.commands.convert.distributed import extra_states, stored_parameter
from megatron_rl.models import architecture, named_config
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import transformer_engine_name
from tests.commands.convert import models
from tests.trainer.cases import run_config, world_of_one

REAL = ("llama-3.1-8b", "llama-4-scout-17b-16e")


def requested(arch: Architecture) -> tuple[set[Any], set[str]]:
    """Return (key, global shape, offset) of the local spec's tensors, and its objects' keys."""
    import torch

    from megatron_rl.trainer import megatron_build as build

    mapping = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    run = run_config("tiny_scout")
    with world_of_one(run):
        config = build.transformer_config(run, arch, use_te=False)
        config.use_cpu_initialization = True
        with torch.device("meta"):
            module = build.build_module(run, arch, config, use_te=False)
            state = module.sharded_state_dict(metadata={"singleton_local_shards": False})
            tensors, objects = set(), set()
            for entry in state.values():
                if isinstance(entry, mapping.ShardedObject):
                    objects.add(entry.unique_key)
                    continue
                if isinstance(entry, mapping.ShardedTensorFactory):
                    # Gate and up are requested one by one; the first begins where both do.
                    entry = entry.build()[0]
                assert isinstance(entry, mapping.ShardedTensor)
                at = entry.global_offset[: entry.prepend_axis_num]
                tensors.add((entry.key, tuple(entry.global_shape), tuple(at)))
    return tensors, objects


@pytest.mark.parametrize("name", [*models.NAMES, *REAL])
def test_everything_that_megatron_requests_is_stored(name: str) -> None:
    arch = architecture(named_config(name) if name in REAL else models.config_of(name))
    tensors, objects = requested(arch)
    stacked = "moe_layer_freq" not in arch.config_fields()
    assert stacked == (arch.experts == 0)
    weights = [w for w in arch.weights() if w.exported]
    stored = [stored_parameter(arch, w, stacked) for w in weights]
    ours = {
        (key, (*p.stack, *w.shape), p.index)
        for p, w in zip(stored, weights, strict=True)
        for key in p.keys
    }
    assert tensors <= ours
    # The rest is Transformer Engine's name of the norm before a mixture of experts.
    assert {key for key, *_ in ours - tensors} == {
        f"decoder.layers.{i}.pre_mlp_layernorm.weight" for i in getattr(arch, "moe_layers", ())
    }
    assert objects <= {state for p in stored for state in extra_states(p)}


@pytest.mark.parametrize("name", models.NAMES)
def test_transformer_engines_parameters_have_keys(name: str) -> None:
    arch = architecture(models.config_of(name))
    for weight in arch.weights():
        te = transformer_engine_name(weight.megatron)
        te = re.sub(r"\.experts\.(linear_fc\d)\.?weight\d+$", r".experts.experts.\1.weight", te)
        te = re.sub(r"\.experts\.(linear_fc\d)\.weight\d+$", r".experts.experts.\1.weight", te)
        assert te in stored_parameter(arch, weight, stacked=False).keys


def test_worked_examples(tmp_path: Path) -> None:
    dense, scout = (architecture(models.config_of(n)) for n in ("tiny_dense", "tiny_scout"))
    by_name = {w.megatron: w for w in dense.weights()}
    weight = by_name["decoder.layers.1.self_attention.linear_proj.weight"]
    proj = stored_parameter(dense, weight, stacked=True)
    assert (proj.keys, proj.stack, proj.index) == (
        ("decoder.layers.self_attention.linear_proj.weight",), (3,), (1,)
    )  # fmt: skip
    assert extra_states(proj) == [
        "decoder.layers.self_attention.linear_proj._extra_state/shard_1_3",
        "decoder.layers.self_attention.core_attention._extra_state/shard_1_3",
    ]
    expert = {w.megatron: w for w in scout.weights()}[
        "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight"
    ]
    stored = stored_parameter(scout, expert, stacked=False)
    assert stored.keys == ("decoder.layers.2.mlp.experts.experts.linear_fc1.weight",)
    assert (stored.stack, stored.index) == ((4,), (3,))
    assert extra_states(stored) == [
        "decoder.layers.2.mlp.experts.experts.linear_fc1._extra_state/shard_3_4"
    ]
