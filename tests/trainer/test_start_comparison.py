"""The comparison of trainer and generators before the first update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.config import ConfigError
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.start_comparison import StartComparison, bound, differences
from megatron_rl.trainer.step import Trainer
from tests.trainer.cases import batch, run_config, world_of_one, write_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_model(tmp_path_factory.mktemp("model") / "hf", "tiny_dense")
    with world_of_one(run_config(folder)):
        yield folder


def metrics(mean: float, tokens: int = 10) -> dict[str, float]:
    names = ("error_mean", "error_max", "tokens")
    values = (mean, 2 * mean, tokens)
    return {f"same_version_logprob_{n}": v for n, v in zip(names, values, strict=True)}


def test_the_bound_follows_the_number_formats() -> None:
    cases = (
        ({}, 0.1 if torch.cuda.is_available() else 1e-3),
        ({"precision__params": "bf16"}, 0.1),
        ({"precision__generator_logits": "bf16"}, 0.1),
        ({"metrics__max_logprob_error": 0.02}, 0.02),
    )
    for changes, expected in cases:
        assert bound(run_config("tiny_dense", **changes)) == expected, changes


def test_only_the_first_step_with_tokens_of_its_own_weights_is_compared(directory: Path) -> None:
    policy = Policy(run_config(directory, metrics__max_logprob_error=0.02), directory)
    comparison = StartComparison(policy)
    comparison.check(metrics(9.0, tokens=0), 7)
    comparison.check(metrics(0.019), 8)
    comparison.check(metrics(9.0), 9)
    with pytest.raises(ConfigError, match=r"step 7: .* differ by 0.021 nats \(mean; max 0.042\)"):
        StartComparison(policy).check(metrics(0.021), 7)


def test_the_own_layers_are_those_of_config_json_and_others_are_named(directory: Path) -> None:
    policy = Policy(run_config(directory), directory)
    assert differences(policy) == []
    policy.modules[0].config.softmax_scale = 0.5
    policy.modules[0].decoder.layers[1].mlp.extra = type("Extra", (torch.nn.Module,), {})()
    scale, layer = differences(policy)
    assert scale == "softmax_scale = 0.5 (None there)"
    assert layer.startswith("decoder.layers.*.mlp.extra is a ")


def test_a_step_that_differs_changes_no_weight(directory: Path) -> None:
    config = run_config(directory, metrics__max_logprob_error=1e-3)
    policy = Policy(config, directory)
    before = {name: p.detach().clone() for name, p in policy.parameters.items()}
    with pytest.raises(ConfigError, match="step 0"):  # its log-probs are random numbers
        Trainer(config, policy, StartComparison(policy)).train_step(batch(), 0)
    for name, p in policy.parameters.items():
        assert torch.equal(p, before[name]), name
