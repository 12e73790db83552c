"""The recipes: all of the paper exist, resolve, and name their source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_rl import recipes
from megatron_rl.commands.plan.layouts import layout_problems
from megatron_rl.commands.plan.memory import estimate
from megatron_rl.commands.recipes import RECIPE_SECTIONS, differences, resolved
from megatron_rl.config import ConfigError, RunConfig, load_config
from megatron_rl.models import architecture, named_config

PAPER = {
    "scalerl",
    "minimax",
    "magistral",
    "dapo",
    "grpo",
    "gspo",
    "pipeline_rl_8",
    "ppo_off_policy_8",
    "dr_grpo",
    "lite_ppo",
    "prorl",
    "mini_rl",
    "dppo",
}
LEAVE_ONE_OUT = {
    "scalerl-loo-fp32": {"precision.logits"},
    "scalerl-loo-npr": {"algorithm.no_positive_resampling"},
    "scalerl-loo-prompt-std": {"algorithm.advantage_normalization"},
    "scalerl-loo-zero-variance": {"algorithm.zero_variance_filter"},
    "scalerl-loo-sample-mean": {"algorithm.aggregation"},
    "scalerl-loo-ppo-off-policy-8": {
        "schedule.mode",
        "schedule.max_lag_steps",
        "schedule.updates_per_phase",
    },
    "scalerl-loo-dapo-loss": {
        "algorithm.loss.kind",
        "algorithm.loss.max_ratio",
        "algorithm.loss.min_ratio",
        "algorithm.loss.dual_clip_ratio",
    },
    "scalerl-loo-length-penalty": {
        "algorithm.length_penalty",
        "algorithm.length_max_tokens",
        "algorithm.length_cache_tokens",
        "generation.interruption",
        "generation.thinking_budget_tokens",
    },
}


EXAMPLES = Path(__file__).parents[2] / "examples"
PAPER_SIZE = ("scalerl_8b", "scalerl_8b_node", "scalerl_scout", "scalerl_8b_math_code")
LONGER = {"scalerl-think-32k", "dapo-original"}
"""Recipes whose completions are longer than those that the examples' layouts are for."""


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
        env={"COLUMNS": "200", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_recipe_of_the_paper_exists() -> None:
    assert set(recipes.names()) >= PAPER | set(LEAVE_ONE_OUT)


def test_every_recipe_resolves_fits_the_example_and_names_its_source() -> None:
    example = EXAMPLES / "scalerl_tiny.yaml"
    for name in recipes.names():
        recipe = recipes.load(name)
        assert recipe.summary, name
        assert "arXiv" in recipe.source, name
        config = load_config(None, ["--recipe", name])
        assert config.recipe == name
        # The resolved values are a configuration of their own, the same one.
        assert RunConfig.model_validate(config.model_dump(mode="json")) == config, name
        small = load_config(example, ["--recipe", name])
        assert (small.schedule.prompts_per_step, small.model) == (16, "tiny_scout"), name
        assert small.algorithm.loss == config.algorithm.loss, name


def test_every_recipe_keeps_its_values_on_every_example_of_paper_size() -> None:
    machine = {
        "schedule": {"micro_batch_tokens"},
        "generation": {"concurrent_completions"},
        "verifier": {"workers"},
    }
    for example in PAPER_SIZE:
        path = EXAMPLES / f"{example}.yaml"
        arch = architecture(named_config(load_config(path).model))
        for name in recipes.names():
            run, alone = (
                load_config(path, ["--recipe", name]),
                load_config(None, ["--recipe", name]),
            )
            for section in (*RECIPE_SECTIONS, "verifier"):
                exclude = machine.get(section, set())
                if example == "scalerl_8b_node":
                    exclude = exclude | {"steps"}
                ours, theirs = (
                    getattr(c, section).model_dump(exclude=exclude) for c in (run, alone)
                )
                assert ours == theirs, (example, name, section)
            assert run.evaluation.every_steps == 100
            assert layout_problems(run, arch) == []
            plan = estimate(run, arch)
            assert bool(plan.misfits or plan.notes) == (name in LONGER), (example, name)


def test_what_is_inferred_or_chosen_is_named_for_every_recipe_of_the_paper() -> None:
    for name in recipes.names():
        recipe = recipes.load(name)
        values = dict(recipes.flatten(recipe.values))
        reasons = {**recipe.inferred, **recipe.choices}
        assert set(reasons) <= set(values) and all(reasons.values()), name
        assert not set(recipe.inferred) & set(recipe.choices), name
    scalerl, base = recipes.load("scalerl"), recipes.load("pipeline_rl_8")
    assert {"optimizer.beta2", "algorithm.advantage_std_over"} <= set(scalerl.inferred)
    assert {"optimizer.clip_grad_norm", "generation.temperature"} <= set(scalerl.choices)
    # A recipe takes over the reasons of its base, but for the keys that it sets itself.
    assert base.inferred["optimizer.beta2"] == scalerl.inferred["optimizer.beta2"]
    assert ".26" in base.inferred["algorithm.loss.max_ratio"]
    assert "algorithm.loss.max_ratio" not in recipes.load("dapo").inferred  # printed in A.16
    assert "algorithm.aggregation" not in recipes.load("dapo").inferred
    shown = command("recipes", "show", "scalerl-batch-2048")
    inferred, _, rest = shown.partition("# on which the source says nothing")
    assert "#   schedule.prompts_per_step = 128: 2,048 completions" in inferred
    assert "#   optimizer.clip_grad_norm = 1.0: not printed" in rest
    assert "schedule.steps =" not in shown  # 7,400 is printed


def test_the_runs_of_section_5() -> None:
    sizes = {
        "scalerl": (48, 16, 6200),
        "scalerl-batch-512": (32, 16, 5300),
        "scalerl-batch-2048": (128, 16, 7400),
        "scalerl-8-completions": (96, 8, 6200),
        "scalerl-24-completions": (32, 24, 6200),
        "scalerl-32-completions": (24, 32, 6200),
        "scalerl-scout": (48, 16, 7100),
    }
    for name, size in sizes.items():
        s = load_config(None, ["--recipe", name]).schedule
        assert (s.prompts_per_step, s.completions_per_prompt, s.steps) == size, name
    long = load_config(None, ["--recipe", "scalerl-think-32k"]).generation
    assert long.thinking_budget_tokens == (30720, 32768)
    assert long.completion_tokens == 34 * 1024  # the 34k of A.15


def test_gspo_has_the_bounds_of_its_legends_on_the_baseline() -> None:
    for name, x, y, z in (
        ("gspo", 5, 3, 3), ("gspo-4-3-e-3", 4, 3, 3), ("gspo-4-3-e-4", 4, 3, 4),
        ("gspo-4-3-e-2", 4, 3, 2), ("gspo-4-3-e-1", 4, 3, 1),
    ):  # fmt: skip
        config = load_config(None, ["--recipe", name])
        loss = config.algorithm.loss.model_dump()
        assert loss["max_ratio"] == pytest.approx(1 + x * 10**-z), name
        assert loss["min_ratio"] == pytest.approx(1 - y * 10**-z), name
        assert config.schedule.summary() == "PipelineRL-8"
    assert {key for key, *_ in differences(resolved("pipeline_rl_8"), resolved("gspo"))} == {
        "algorithm.loss.kind",
        "algorithm.loss.min_ratio",
        "algorithm.loss.max_ratio",
        "algorithm.loss.dual_clip_ratio",
    }


def test_a_leave_one_out_variant_differs_in_its_one_choice() -> None:
    scalerl = resolved("scalerl")
    changes = {n: {key for key, *_ in differences(scalerl, resolved(n))} for n in LEAVE_ONE_OUT}
    assert changes == LEAVE_ONE_OUT
    assert {recipes.load(name).base for name in LEAVE_ONE_OUT} == {"scalerl"}


def test_scalerl_has_the_values_of_the_paper() -> None:
    config = load_config(None, ["--recipe", "scalerl"])
    a, s, o = config.algorithm, config.schedule, config.optimizer
    assert (a.loss.kind, a.aggregation, a.advantage_normalization) == ("cispo", "prompt", "batch")
    assert (s.mode, s.max_lag_steps) == ("pipeline", 8)
    assert s.prompts_per_step * s.completions_per_prompt == 768
    assert (o.learning_rate, o.warmup_steps, o.eps, o.weight_decay) == (5e-7, 100, 1e-15, 0.01)
    assert config.generation.thinking_budget_tokens == (10240, 12288)
    rewards = {"correct": 1, "wrong": -1, "no_answer": -1, "unparsable": -1, "timed_out": None}
    for name in recipes.names():
        values = load_config(None, ["--recipe", name]).verifier.values
        assert values.model_dump() == rewards, name
    # And they are the defaults of the product, but for the length of a run.
    differing = differences(resolved("scalerl"), RunConfig().model_dump(mode="json"))
    assert differing == [("schedule.steps", "6200", "1000")]


def test_the_papers_comparison_has_its_values() -> None:
    configs = {
        n: load_config(None, ["--recipe", n]) for n in ("grpo", "dapo", "magistral", "minimax")
    }
    clips = {n: c.algorithm.loss.model_dump() for n, c in configs.items()}
    assert clips["grpo"] == {**clips["grpo"], "min_ratio": 0.8, "max_ratio": 1.2}
    assert clips["dapo"] == {**clips["dapo"], "min_ratio": 0.8, "max_ratio": 1.26}
    assert clips["magistral"] == clips["dapo"]
    assert clips["minimax"]["kind"] == "cispo"
    assert {n: c.schedule.summary() for n, c in configs.items()} == {
        "grpo": "PPO-off-policy-8",
        "dapo": "PPO-off-policy-8",
        "magistral": "PipelineRL-8",
        "minimax": "PPO-off-policy-8",
    }
    assert {n: c.algorithm.aggregation for n, c in configs.items()} == {
        **dict.fromkeys(("dapo", "magistral", "minimax"), "prompt"),
        "grpo": "sample",
    }
    assert {n: c.precision.logits for n, c in configs.items() if c.precision.logits == "fp32"} == {
        "minimax": "fp32"
    }
    for name in ("dapo", "magistral", "minimax"):  # 1,280 completions
        assert configs[name].schedule.prompts_per_step == 80


def test_recipe_then_file_then_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("recipe: dapo\nschedule: {prompts_per_step: 12}\nseed: 3\n")
    config = load_config(path, ["--seed", "4"])
    assert config.algorithm.loss.kind == "ppo_clip"  # the recipe's
    assert config.schedule.prompts_per_step == 12  # the file's, over the recipe's
    assert config.seed == 4  # the command line's, over the file's
    assert load_config(path, ["--recipe", "gspo"]).algorithm.loss.kind == "gspo"


def test_an_unknown_recipe_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("recipe: scale_rl\n")
    with pytest.raises(
        ConfigError, match="recipe is 'scale_rl': no such recipe; there are scalerl"
    ):
        load_config(path)


def test_an_unknown_key_in_a_recipe_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"summary": "s", "source": "s", "values": {"algorithm": {"cap": 3}}}
    monkeypatch.setattr(recipes, "_entries", lambda: {"mine": entry})
    with pytest.raises(ConfigError, match="algorithm.cap: unknown key"):
        load_config(None, ["--recipe", "mine"])
    for kind in ("inferred", "choices"):
        other = {**entry, kind: {"algorithm.cap": "why", "optimizer.eps": "why"}}
        monkeypatch.setattr(recipes, "_entries", lambda other=other: {"mine": other})
        with pytest.raises(ConfigError, match=r"recipe mine: \['optimizer.eps'\] of inferred"):
            recipes.load("mine")


def test_a_malformed_recipe_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.yaml").write_text("summary: x\nvalue: {}\n")
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)
    recipes._entries.cache_clear()
    try:
        with pytest.raises(ConfigError, match="recipe broken.yaml: keys"):
            recipes.names()
    finally:
        monkeypatch.undo()
        recipes._entries.cache_clear()


def test_merge_replaces_a_choice_of_another_kind_as_a_whole() -> None:
    base = {"loss": {"kind": "cispo", "max_ratio": 4}, "steps": 1}
    assert recipes.merge(base, {"loss": {"kind": "gspo"}})["loss"] == {"kind": "gspo"}
    assert recipes.merge(base, {"loss": "gspo"})["loss"] == {"kind": "gspo"}
    kept = recipes.merge(base, {"loss": {"max_ratio": 8}})
    assert kept == {"loss": {"kind": "cispo", "max_ratio": 8}, "steps": 1}
    assert base["loss"] == {"kind": "cispo", "max_ratio": 4}


def test_the_command_lists_shows_and_compares() -> None:
    listed = command("recipes")
    assert all(name in listed for name in PAPER)
    shown = command("recipes", "show", "scalerl-loo-fp32")
    assert "# based on: scalerl" in shown
    values = resolved("scalerl-loo-fp32")
    assert yaml.safe_load(shown) == {
        **{key: values[key] for key in RECIPE_SECTIONS},
        "verifier": {"values": values["verifier"]["values"]},
    }
    compared = command("recipes", "diff", "dapo", "magistral")
    assert "schedule.mode" in compared
    assert "ppo_off_policy" in compared
    assert "algorithm" not in compared


def test_the_output_of_show_is_a_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "shown.yaml"
    path.write_text(command("recipes", "show", "grpo"))
    config = load_config(path)
    assert config.model_copy(update={"recipe": "grpo"}) == load_config(None, ["--recipe", "grpo"])
