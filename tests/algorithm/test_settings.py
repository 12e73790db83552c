"""What does not go together is refused with both keys named; what follows is filled in."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from megatron_rl.algorithm.losses import LossChoice
from megatron_rl.algorithm.losses.gspo import Gspo
from megatron_rl.algorithm.losses.ppo import PpoClip
from megatron_rl.algorithm.settings import Algorithm
from megatron_rl.config import ConfigError, load_config

PPO = ["--algorithm.loss", "ppo_clip"]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["--algorithm.old_policy", "trainer"], ("algorithm.old_policy", "algorithm.loss.kind")),
        (
            ["--algorithm.correction", "token_mask"],
            ("algorithm.correction.kind is 'token_mask'", "algorithm.loss.kind = 'cispo'"),
        ),
        (
            [*PPO, "--algorithm.correction.kind", "token_truncation"],
            ("algorithm.correction.kind", "algorithm.old_policy = 'generator'"),
        ),
        (
            [
                "--algorithm.loss=mini_rl",
                "--algorithm.old_policy=trainer",
                "--algorithm.correction=sequence_mask",
            ],
            ("algorithm.correction.kind", "algorithm.loss.kind = 'mini_rl'"),
        ),
        (
            ["--algorithm.kl_reset_steps", "5"],
            ("algorithm.kl_reset_steps is 5", "algorithm.kl_coefficient is 0"),
        ),
        (
            ["--algorithm.constant_length_tokens", "9"],
            ("algorithm.constant_length_tokens is 9", "algorithm.aggregation = 'prompt'"),
        ),
        (
            ["--algorithm.advantage_std_over=all", "--algorithm.advantage_normalization=prompt"],
            ("algorithm.advantage_std_over", "algorithm.advantage_normalization = 'prompt'"),
        ),
        (
            ["--algorithm.refill", "--no-algorithm.zero_variance_filter"],
            ("algorithm.refill is true", "algorithm.zero_variance_filter is false"),
        ),
        (
            ["--algorithm.length_max_tokens", "9"],
            ("algorithm.length_max_tokens is 9", "algorithm.length_penalty = 'none'"),
        ),
        (
            [
                "--algorithm.length_penalty=all",
                "--algorithm.length_max_tokens=9",
                "--algorithm.length_cache_tokens=10",
            ],
            ("algorithm.length_cache_tokens is 10", "algorithm.length_max_tokens = 9"),
        ),
        (
            [*PPO, "--algorithm.loss.dual_clip_ratio", "1.1"],
            ("algorithm.loss.dual_clip_ratio is 1.1", "algorithm.loss.max_ratio = 1.2"),
        ),
        (
            ["--generation.interruption", "none"],
            ("generation.thinking_budget_tokens is (10240, 12288)", "generation.interruption"),
        ),
        (
            ["--schedule.mode", "synchronous", "--schedule.max_lag_steps", "3"],
            ("schedule.max_lag_steps is 3", "schedule.mode = 'synchronous'"),
        ),
    ],
)
def test_contradictions_are_refused_with_both_keys(
    overrides: list[str], keys: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as e:
        load_config(None, overrides)
    for key in keys:
        assert key in str(e.value)


def test_keys_with_a_single_legal_value_do_not_exist() -> None:
    keys = ("generation.top_p", "generation.top_k", "generation.min_p")
    for key in (*keys, "algorithm.advantage_estimator"):
        with pytest.raises(ConfigError, match=f"{key}: unknown key"):
            load_config(None, [f"--{key}", "1"])


def test_a_temperature_is_accepted_because_it_is_corrected_for() -> None:
    assert load_config(None, ["--generation.temperature", "0.7"]).generation.temperature == 0.7


def test_a_parameter_of_another_loss_is_refused_with_the_kind() -> None:
    with pytest.raises(ConfigError) as e:
        load_config(None, ["--algorithm.loss.min_ratio", "0.9"])
    assert "algorithm.loss.min_ratio: unknown key (value '0.9')" in str(e.value)
    assert "algorithm.loss of kind cispo has: kind, max_ratio" in str(e.value)


def test_a_loss_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError) as e:
        load_config(None, ["--algorithm.loss.kind", "ppo5"])
    assert "algorithm.loss.kind is 'ppo5'" in str(e.value)
    for loss in get_args(get_args(LossChoice)[0]):
        assert f"'{loss.model_fields['kind'].default}'" in str(e.value)


def test_a_loss_by_its_name_alone_has_its_defaults() -> None:
    assert Algorithm(loss="gspo").loss == Gspo()
    assert load_config(None, PPO).algorithm.loss == PpoClip()


def test_another_kind_drops_the_parameters_of_the_one_below_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: {loss: {kind: cispo, max_ratio: 4.0}}\n")
    assert load_config(path, ["--algorithm.loss", "gspo"]).algorithm.loss == Gspo()
    kept = load_config(path, ["--algorithm.loss.max_ratio", "8"]).algorithm.loss
    assert (kept.kind, kept.max_ratio) == ("cispo", 8.0)  # type: ignore[union-attr]


def test_lengths_follow_from_the_longest_completion() -> None:
    budgets = ["--generation.thinking_budget_tokens", "[80, 80]"]
    budgets += ["--generation.answer_budget_tokens", "20"]
    constant = load_config(None, [*budgets, "--algorithm.aggregation", "constant"]).algorithm
    assert constant.constant_length_tokens == 100
    penalized = load_config(None, [*budgets, "--algorithm.length_penalty", "all"]).algorithm
    assert (penalized.length_max_tokens, penalized.length_cache_tokens) == (100, 14)
    plain = load_config(None, budgets).algorithm
    assert plain.length_max_tokens is None
    assert plain.constant_length_tokens is None
