"""A process may leave its world and make another: nothing of the first stays."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import torch

from megatron_rl.trainer.model import Policy
from tests.trainer.cases import run_config, world_of_one, write_model
from tests.workers import PRELOADED, run_script


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


def make_three_worlds(folder: Path) -> None:
    """Fail if anything of a world stays; in a process of its own, whose files are its alone."""
    directory = write_model(folder / "hf", "tiny_scout")
    files = []
    for _ in range(3):
        model = a_pass(directory)
        gc.collect()
        assert model() is None
        files.append(len(os.listdir("/proc/self/fd")))
    assert files[2] <= files[0], files


def test_a_model_with_experts_goes_with_its_world_and_its_sockets(tmp_path: Path) -> None:
    code = f"import tests.trainer.test_world as t; t.make_three_worlds(t.Path({str(tmp_path)!r}))"
    status, output = run_script(code, tmp_path, PRELOADED)
    assert status == 0, output
