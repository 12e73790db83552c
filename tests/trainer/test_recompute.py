"""Recomputed activations leave the gradients as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.cases import batch, gradients, run_config, world_of_one, write_model


def trained(directory: Path, recompute: str) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of one step, and how often a first linear layer of an MLP was run for it."""
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.step import Trainer

    config = run_config(directory, parallel__recompute=recompute)
    with world_of_one(config):
        policy = Policy(config, directory)
        seen: dict[str, Any] = {"runs": 0}

        def observed(rate: float) -> float:
            seen["gradients"] = gradients(policy)
            return 0.0

        def count(*_: Any) -> None:
            seen["runs"] += 1

        policy.apply = observed  # type: ignore[method-assign]
        for name, module in policy.modules[0].named_modules():
            if name.endswith("linear_fc1"):
                module.register_forward_hook(count)
        Trainer(config, policy).train_step(batch(), 0)
    return seen["gradients"], seen["runs"]


@pytest.mark.parametrize("name", ["tiny_dense", "tiny_scout"])
def test_gradients_do_not_depend_on_what_is_recomputed(tmp_path: Path, name: str) -> None:
    directory = write_model(tmp_path / name, name)
    expected, once = trained(directory, "none")
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-5
    for recompute in ("selective", "full"):
        found, runs = trained(directory, recompute)
        assert runs > once, f"{recompute} computed nothing again"
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-8, msg=key)
