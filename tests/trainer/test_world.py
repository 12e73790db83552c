"""A process may leave its world and make another: nothing of the first stays."""

from __future__ import annotations

import gc
import os
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megatron_rl.trainer.model import Policy
from tests.trainer.cases import run_config, world_of_one, write_model


def a_pass(directory: Path) -> weakref.ref[Any]:
    """Run a forward pass with a graph, and no backward pass, in a new world."""
    from megatron_rl.models.attention import Rows  # imports Megatron: after policy's mends

    config = run_config(directory)
    with world_of_one(config):
        policy = Policy(config, directory)
        tokens_BS = torch.randint(1, 32, (3, 40))
        rows = Rows.of_bounds((0, 40), 0, 1, tokens_BS.device)
        policy.modules[0](
            tokens_BS, rows.positions_s.expand_as(tokens_BS), None, packed_seq_params=rows
        )
        return weakref.ref(policy.modules[0])


def test_a_model_with_experts_goes_with_its_world_and_its_sockets(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "hf", "tiny_scout")
    files = []
    for _ in range(3):
        model = a_pass(directory)
        gc.collect()
        assert model() is None
        files.append(len(os.listdir("/proc/self/fd")))
    assert any(after <= before for before, after in pairwise(files)), files
