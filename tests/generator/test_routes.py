"""Routing replay closes the gap that another rounding of the routers opens in bf16."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.config import RunConfig
from tests.generator import tiny_models
from tests.generator.conftest import Ask, needs_vllm, run_config, running_engine
from tests.generator.routed import batch_of

pytestmark = [pytest.mark.e2e, needs_vllm]


def test_replay_halves_the_mismatch_of_bf16_and_leaves_no_route_different(
    trainer: Ask, tmp_path: Any
) -> None:
    directory = tiny_models.save("qwen3_moe", 0, tmp_path)
    tree = run_config(directory).model_dump(mode="json")
    tree["precision"]["params"] = "bf16"
    tree["algorithm"]["routing_replay"] = "replay"
    with running_engine(RunConfig.model_validate(tree), directory) as (engine, loop):
        batch, _ = loop.run_until_complete(batch_of(engine))
    trainer("start", str(directory), batch.step, "bf16")
    live, replayed = (trainer("metrics", batch, mode) for mode in ("compare", "replay"))
    names = {
        "same_version_logprob_error_mean": "mean error",
        "same_version_logprob_error_max": "largest error",
        "mismatch_kl": "KL",
        "routes_differing_fraction": "routes that differ",
        "routes_differing_live_fraction": "routes that would have differed",
    }
    for name, text in names.items():
        print(f"{text}: {live[name]:.3g} without replay, {replayed[name]:.3g} with it")
    assert live["routes_differing_fraction"] > 0
    assert live["routes_differing_fraction"] == live["routes_differing_live_fraction"]
    assert replayed["routes_differing_fraction"] == 0.0
    assert replayed["routes_differing_live_fraction"] > 0
    for name in ("same_version_logprob_error_mean", "mismatch_kl"):
        assert replayed[name] < live[name] / 2, name
