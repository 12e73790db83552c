"""Parameters per rank are exactly those of the module that Megatron builds for that rank.

One process acts as one rank after the other: the fake backend of `torch.distributed` gives it the
groups of a world without other processes, and the module is built on the meta device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.commands.plan.layouts import layout_problems
from megatron_rl.commands.plan.tensors import count_stages
from megatron_rl.config import Parallel, RunConfig
from megatron_rl.models import architecture, named_config
from megatron_rl.models.base import Architecture
from megatron_rl.models.tiny import CONFIGS

SP = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense": ("tiny_dense", 1, {}),
    "dense TP2 PP3 of an odd vocabulary": ("odd", 6, {"tensor": 2, "pipeline": 3}),
    "dense PP2, uneven": ("tiny_dense", 4, {"pipeline": 2}),
    "tied": ("tied", 2, {"tensor": 2}),
    "tied PP3": ("tied", 3, {"pipeline": 3}),
    "qwen3 TP2": ("tiny_qwen3", 4, {"tensor": 2, **SP}),
    "scout EP4": ("tiny_scout", 4, {"expert": 4}),
    "scout TP2 EP2 ETP2 PP3": (
        "tiny_scout",
        12,
        {"tensor": 2, "expert": 2, "expert_tensor": 2, "pipeline": 3, **SP},
    ),
    "scout TP2 EP4 ETP1": ("tiny_scout", 4, {"tensor": 2, "expert": 4, **SP}),
    "qwen3 moe TP2 EP2 PP3": (
        "tiny_qwen3_moe",
        6,
        {"tensor": 2, "expert": 2, "pipeline": 3, **SP},
    ),
    "llama 8b TP4 PP2 VPP4": (
        "llama-3.1-8b",
        16,
        {"tensor": 4, "pipeline": 2, "virtual_pipeline": 4},
    ),
    "llama 4 scout TP4 EP16": ("llama-4-scout-17b-16e", 16, {"tensor": 4, "expert": 16, **SP}),
    "llama 4 scout TP8 PP4 EP4 ETP2": (
        "llama-4-scout-17b-16e",
        32,
        {"tensor": 8, "pipeline": 4, "expert": 4, "expert_tensor": 2, **SP},
    ),
}


def config_of(name: str) -> dict[str, Any]:
    if name == "odd":
        return {**CONFIGS["tiny_dense"], "vocab_size": 31}
    if name == "tied":
        return {**CONFIGS["tiny_dense"], "vocab_size": 33, "tie_word_embeddings": True}
    return CONFIGS.get(name) or named_config(name)


def built(run: RunConfig, arch: Architecture, rank: int) -> int:
    """Count the parameters of the module that Megatron builds for a rank."""
    from megatron_rl.trainer import megatron_build as build

    parallel_state = build.parallel_state
    p = run.parallel
    world = run.roles.trainer_ranks
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=p.tensor,
            pipeline_model_parallel_size=p.pipeline,
            virtual_pipeline_model_parallel_size=(
                p.virtual_pipeline if p.virtual_pipeline > 1 else None
            ),
            expert_model_parallel_size=p.expert,
            expert_tensor_parallel_size=p.expert_tensor,
            create_gloo_process_groups=False,
        )
        config = build.transformer_config(run, arch, use_te=False)
        config.use_cpu_initialization = True
        with torch.device("meta"):
            modules = [
                build.build_module(run, arch, config, False, chunk)
                for chunk in range(p.virtual_pipeline)
            ]
        return sum(q.numel() for module in modules for q in module.parameters())
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_as_many_parameters_as_megatron_builds(layout: str) -> None:
    name, ranks, sizes = LAYOUTS[layout]
    arch = architecture(config_of(name))
    run = RunConfig.model_validate({"roles": {"trainer_ranks": ranks}, "parallel": sizes})
    assert not layout_problems(run, arch)
    counts = count_stages(arch, run.parallel)
    # Stages are the slowest dimension of the ranks; all ranks of a stage are alike.
    per_stage = ranks // run.parallel.pipeline
    for stage, count in enumerate(counts):
        for rank in {stage * per_stage, (stage + 1) * per_stage - 1}:
            assert built(run, arch, rank) == count.total(), (stage, rank)


def test_the_shards_of_a_model_add_up_to_the_model() -> None:
    arch = architecture(named_config("llama-4-scout-17b-16e"))
    (whole,) = count_stages(arch, Parallel())
    assert whole.total() == arch.parameters() == 107_769_861_120
    (sharded,) = count_stages(arch, Parallel(tensor=4, expert=16, sequence_parallel=True))
    assert sharded["expert"] * 16 == whole["expert"]
    assert sharded.total() < whole.total() / 10
