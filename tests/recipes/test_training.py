"""Every recipe trains the tiny task, from generator messages to the optimizer step.

One Megatron rank in this process, batches built as the orchestrator builds them; no engine.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl import recipes
from megatron_rl.commands.study.study_file import FOLDER
from megatron_rl.config import RunConfig, load_config
from megatron_rl.metrics import METRICS
from megatron_rl.orchestrator.batching import build_batch
from megatron_rl.orchestrator.groups import Group
from tests.recipes.rollouts import Rollouts
from tests.trainer.cases import run_config, world_of_one, write_model

pytestmark = pytest.mark.e2e

STEPS, PROMPTS = 10, 5
"""Steps at least; a recipe in phases also takes the first two of its second phase."""
BASE = FOLDER / "tiny.yaml"
DISTINCT = {
    load_config(BASE, ["--recipe", name]).model_dump_json(exclude={"recipe"}): name
    for name in reversed(recipes.names())
}
"""Recipes by their values at this size, which variants of batch and lengths share."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "hf", "tiny_dense")


@pytest.fixture(scope="module", autouse=True)
def world(model: Path) -> Iterator[None]:
    """One Megatron world of this process for all recipes."""
    with world_of_one(run_config(model)):
        yield


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Rollouts:
    return Rollouts(tmp_path_factory.mktemp("tokenizer"))


def tiny(name: str, model: Path, output: Path) -> RunConfig:
    """Return the recipe at the size of these tests, with all of its own values."""
    overrides = [
        *("--recipe", name, "--model", str(model), "--output_dir", str(output)),
        *("--roles.trainer_ranks", "1", "--parallel.expert", "1"),
        *("--schedule.prompts_per_step", str(PROMPTS), "--schedule.completions_per_prompt", "4"),
        *("--schedule.steps", "20", "--optimizer.learning_rate", "1e-3"),
        *("--schedule.micro_batch_tokens", "600"),
    ]
    config = load_config(BASE, overrides)
    if config.algorithm.kl_reset_steps is not None:  # so that these steps see resets
        config.algorithm.kl_reset_steps = 4
    return config


@pytest.mark.parametrize("name", sorted(DISTINCT.values()))
def test_every_recipe_trains_without_a_warning(
    name: str, model: Path, rollouts: Rollouts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.step import Trainer

    config = tiny(name, model, tmp_path)
    assert config.recipe == name
    policy = Policy(config, model)
    trainer = Trainer(config, policy)
    before = rollouts.advantage_of_right(policy)
    dispatched: list[Group] = []
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        # Notices of Megatron and torch to those who call them, as in pyproject.toml.
        for notice in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", notice)
        for step in range(max(STEPS, config.schedule.phase_steps(0) + 2)):
            if not dispatched:  # one phase: of one step, or of updates_per_phase
                count = PROMPTS * config.schedule.phase_steps(step)
                dispatched = rollouts.groups(policy, step, step * PROMPTS, count)
            groups, dispatched = dispatched[:PROMPTS], dispatched[PROMPTS:]
            built = build_batch(step, groups, rollouts.prompts, config.algorithm)
            assert built.metrics["lag_max"] <= config.schedule.max_lag_steps
            done = trainer.train_step(built.batch, step)
            assert all(math.isfinite(x) for x in done.metrics.values())
            assert set(built.metrics) <= set(METRICS)
            assert {k for k in done.metrics if not k.startswith("same_")} <= set(METRICS)
            assert done.metrics["tokens_trained"] > 0
            if step == 0:  # sampled by these weights: no ratio is cut yet
                assert done.metrics["clipped_fraction"] == 0.0
                assert done.metrics["grad_norm"] > 0
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert rollouts.advantage_of_right(policy) > before + 0.01
    if config.algorithm.kl_coefficient:
        assert done.metrics["kl_reference"] >= 0
