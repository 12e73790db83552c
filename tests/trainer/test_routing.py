"""Routing replay in one process: what is taken, what is counted, and what the gradient is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl import messages
from megatron_rl.models import routed_experts
from tests.trainer.cases import (
    batch,
    gradients,
    run_config,
    with_random_routes,
    with_routes,
    world_of_one,
)
from tests.trainer.cases import write_model as write

MODELS = {"tiny_scout": 1, "tiny_qwen3_moe": 2}
"""Name -> experts per token."""


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    return write(tmp_path_factory.mktemp("moe") / request.param, request.param)


class Seen:
    """One training step, and the routing maps [tokens, experts] of its layers."""

    def __init__(self, directory: Path, message: Any, mode: str, **options: Any) -> None:
        from megatron_rl.trainer.model import Policy
        from megatron_rl.trainer.step import Trainer

        # One micro-batch, so that the maps are in the order of `origin`.
        options |= {"schedule__micro_batch_tokens": 4096}
        config = run_config(directory, algorithm__routing_replay=mode, **options)
        with world_of_one(config):
            policy = Policy(config, directory)
            self.architecture = policy.architecture
            self.maps: dict[int, list[Tensor]] = {}
            for module in policy.modules[0].modules():
                if type(module).__name__ == "TopKRouter":
                    layer = module.layer_number - 1
                    module.register_forward_hook(
                        lambda _, __, out, at=layer: self.maps.setdefault(at, []).append(out[1])
                    )
            trainer = Trainer(config, policy)
            if callable(message):
                message = message(policy.architecture)
            ((micro,), _) = trainer.prepare(message, 0)
            self.origin = micro.origin_BS.T.reshape(-1).numpy()
            self.message = message
            apply, policy.apply = policy.apply, self._apply  # type: ignore[method-assign]
            self._then, self._policy = apply, policy
            self.metrics = trainer.train_step(message, 0).metrics

    def _apply(self, rate: float) -> float:
        self.gradients = gradients(self._policy)
        return self._then(rate)

    def taken(self) -> np.ndarray:
        """Experts [tokens of the step, layers, experts per token] that tokens were sent to."""
        shape = (self.origin.max() + 1, len(self.maps), self.architecture.experts_per_token)
        found = np.full(shape, routed_experts.UNKNOWN, dtype=np.int16)
        for i, layer in enumerate(sorted(self.maps)):
            chosen = self.maps[layer][0].nonzero()[:, 1].reshape(len(self.origin), -1).numpy()
            found[self.origin[self.origin >= 0], i] = chosen[self.origin >= 0]
        return found


@pytest.fixture(scope="module")
def live(directory: Path) -> Seen:
    return Seen(directory, batch(), "none")


def given(architecture: Any, message: Any) -> np.ndarray:
    routes, tokens = b"".join(message.routes), len(message.token_ids) // 4
    return routed_experts.decode(routes, tokens, architecture)


def test_replaying_the_live_routes_changes_nothing(directory: Path, live: Seen) -> None:
    message = with_routes(batch(), live.taken(), live.architecture)
    for mode in ("compare", "replay"):
        seen = Seen(directory, message, mode)
        assert seen.metrics["routes_differing_fraction"] == 0.0
        assert seen.metrics["routes_differing_live_fraction"] == 0.0
        for name, gradient in seen.gradients.items():
            assert torch.equal(gradient, live.gradients[name]), name
    assert "routes_differing_fraction" not in live.metrics


def test_other_experts_are_taken_with_the_live_routers_weights(directory: Path) -> None:
    seen = Seen(directory, lambda a: with_random_routes(batch(), a), "replay")
    wanted = given(seen.architecture, seen.message)
    known = wanted[:, 0, 0] != routed_experts.UNKNOWN
    assert 0 < (~known).sum() == len(messages.ints(seen.message.bounds)) - 1
    assert np.array_equal(np.sort(seen.taken()[known]), np.sort(wanted[known]))
    assert seen.metrics["routes_differing_fraction"] == 0.0
    assert seen.metrics["routes_differing_live_fraction"] > 0.3
    routers = [g for n, g in seen.gradients.items() if n.endswith(("router.weight", "gate.weight"))]
    assert len(routers) == len(seen.architecture.moe_layers)
    assert all(g.abs().max() > 0 for g in routers)
    # A layer that runs again before its backward pass takes the same experts again.
    again = Seen(directory, seen.message, "replay", parallel__recompute="full")
    assert len(again.maps[0]) == 2
    for name, gradient in again.gradients.items():
        assert torch.equal(gradient, seen.gradients[name]), name


def test_comparing_counts_and_takes_the_live_experts(directory: Path, live: Seen) -> None:
    seen = Seen(directory, lambda a: with_random_routes(batch(), a), "compare")
    wanted, taken = given(seen.architecture, seen.message), seen.taken()
    assert np.array_equal(taken, live.taken())
    known = wanted[:, 0, 0] != routed_experts.UNKNOWN
    same = (wanted[known][..., :, None] == taken[known][..., None, :]).any(-1)
    expected = 1 - same.mean()
    assert seen.metrics["routes_differing_fraction"] == pytest.approx(expected, abs=1e-12)
    assert seen.metrics["routes_differing_live_fraction"] == pytest.approx(expected, abs=1e-12)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    from megatron_rl.trainer.model import Policy

    config = run_config(write(tmp_path, "tiny_dense"), algorithm__routing_replay="replay")
    with world_of_one(config), pytest.raises(ValueError, match="routing_replay is 'replay'.*none"):
        Policy(config, tmp_path)


def test_a_pass_outside_of_following_is_refused(tmp_path: Path) -> None:
    from megatron_rl.trainer.model import Policy

    directory = write(tmp_path, "tiny_scout")
    config = run_config(directory, algorithm__routing_replay="replay")
    with world_of_one(config):
        policy = Policy(config, directory)
        router = next(m for m in policy.modules[0].modules() if type(m).__name__ == "TopKRouter")
        with pytest.raises(RuntimeError, match=r"layer 0 was called outside.*model\.forward"):
            router(torch.zeros(4, 1, router.config.hidden_size))


def test_a_batch_without_routes_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"0 bytes of routed experts.*routing_replay is 'replay'"):
        Seen(directory, batch(), "replay")


@pytest.fixture
def architecture() -> Any:
    from megatron_rl.models import architecture as find
    from megatron_rl.models import tiny

    return find(tiny.CONFIGS["tiny_qwen3_moe"])


@pytest.mark.parametrize("experts", [8, 255, 256, 300])
def test_routes_survive_the_journey(experts: int, architecture: Any) -> None:
    architecture.experts = experts
    layers, k = len(architecture.moe_layers), architecture.experts_per_token
    choices = np.random.default_rng(0).integers(0, experts, (9, layers, k)).astype(np.int16)
    choices[4], choices[0, 0, 0] = routed_experts.UNKNOWN, experts - 1
    data = routed_experts.encode(choices, experts)
    assert len(data) == choices.size * (1 if experts < 256 else 2)
    assert np.array_equal(routed_experts.decode(data, 9, architecture), choices)


def test_routes_of_another_model_are_refused(architecture: Any) -> None:
    layers, k = len(architecture.moe_layers), architecture.experts_per_token
    with pytest.raises(ValueError, match="different models"):
        routed_experts.decode(bytes(9 * layers * k + 1), 9, architecture)
    foreign = np.full((9, layers, k), architecture.experts, dtype=np.int16)
    with pytest.raises(ValueError, match=rf"expert {architecture.experts}.*has"):
        routed_experts.decode(routed_experts.encode(foreign, 255), 9, architecture)
