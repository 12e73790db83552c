"""Text of a configuration file and of the command line is read as it is written, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.config import ConfigError, RunConfig, load_config, save_config

HUB = "task: {kind: huggingface, source: owner/name, %s}\nstart_checkpoint: start\n"
TASK = ["--task", "huggingface", "--task.source", "owner/name", "--start_checkpoint", "start"]


def read(folder: Path, text: str | bytes, overrides: list[str] | None = None) -> RunConfig:
    path = folder / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_config(path, overrides)


def value(config: RunConfig, key: str) -> Any:
    result: Any = config
    for part in key.split("."):
        result = result[part] if isinstance(result, dict) else getattr(result, part)
    return result


def test_plain_text_of_a_file_has_the_type_of_its_field(tmp_path: Path) -> None:
    texts = ("no", "off", "2024-01-01", "0123", "1.10", "12e5678", "true", "1_000", "0x1f", "1:30")
    for key in ("subset", "revision", "split"):
        for text in texts:
            config = read(tmp_path, HUB % f"{key}: {text}")
            assert value(config, f"tasks.huggingface.{key}") == text, key
    assert value(read(tmp_path, HUB % "subset: null"), "tasks.huggingface.subset") is None
    assert value(read(tmp_path, HUB % 'subset: "null"'), "tasks.huggingface.subset") == "null"
    for text, key, expected in (
        ("metrics: {wandb: off, terminal: off}", "metrics.wandb", "off"),
        ("metrics: {wandb: off, terminal: off}", "metrics.terminal", "off"),
        ("metrics: {tensorboard: on}", "metrics.tensorboard", True),
        ("metrics: {tensorboard: no}", "metrics.tensorboard", False),
        ("seed: 0123", "seed", 123),
        ("optimizer: {eps: 1e-3}", "optimizer.eps", 0.001),
        ("verifier: {values: {wrong: -1e-3}}", "verifier.values.wrong", -0.001),
        ("verifier: {values: {wrong: ~}}", "verifier.values.wrong", None),
        ("resume: 5", "resume", 5),
        ("generation: {thinking_budget_tokens: [10, 12]}",
         "generation.thinking_budget_tokens", (10, 12)),
    ):  # fmt: skip
        assert value(read(tmp_path, text), key) == expected, text
    for text, key in (("schedule: {steps: 1:30}", "schedule.steps"), ("seed: 0o17", "seed")):
        with pytest.raises(ConfigError, match=f"{key} is '"):
            read(tmp_path, text)


def test_text_of_the_command_line_has_the_type_of_its_field() -> None:
    for option, key, expected in (
        (["--task.template", "Question: {prompt}"], "tasks.huggingface.template",
         "Question: {prompt}"),
        (["--task.template={prompt} Answer:"], "tasks.huggingface.template", "{prompt} Answer:"),
        (["--task.template", "[{prompt}]"], "tasks.huggingface.template", "[{prompt}]"),
        (["--task.template", "None"], "tasks.huggingface.template", None),
        (["--task.answer_field", "None"], "tasks.huggingface.answer_field", "None"),
        (["--task.revision", "01234567"], "tasks.huggingface.revision", "01234567"),
        (["--task.subset=2024-01-01"], "tasks.huggingface.subset", "2024-01-01"),
        (["--seed", "0123"], "seed", 123),
        (["--metrics.tensorboard", "on"], "metrics.tensorboard", True),
        (["--metrics.tensorboard", "1"], "metrics.tensorboard", True),
        (["--metrics.tensorboard=off"], "metrics.tensorboard", False),
        (["--evaluation.every_steps", "None"], "evaluation.every_steps", None),
        (["--verifier.values.wrong", "-1e-3"], "verifier.values.wrong", -0.001),
        (["--verifier.values.wrong=-.5"], "verifier.values.wrong", -0.5),
        (["--optimizer.learning_rate", "5E-7"], "optimizer.learning_rate", 5e-7),
        (["--sft.against", "[no, 2024-01-01]"], "sft.against", ("no", "2024-01-01")),
        (["--sft.against="], "sft.against", ()),
        *((["--generation.thinking_budget_tokens", text], "generation.thinking_budget_tokens",
           (10, 12)) for text in ("10,12", "10 12", "[10, 12]", "(10, 12)")),
    ):  # fmt: skip
        assert value(load_config(None, [*TASK, *option]), key) == expected, option


def test_options_of_the_command_pass_through_the_parser() -> None:
    done = CliRunner().invoke(
        app,
        ["train", "--plan", "--verifier.values.wrong", "-1e-3", "--optimizer.learning_rate=-1"],
    )
    assert "optimizer.learning_rate is '-1'" in str(done.exception)
    assert "wrong" not in str(done.exception)


def test_options_without_a_declared_type_are_read_as_json(tmp_path: Path) -> None:
    task = "task: {kind: reasoning, dataset: x, options: %s}\nstart_checkpoint: y\n"
    written = "{a: 7, b: 1e-3, c: off, d: 007, e: [1, {f: true}], g: null, h: -2}"
    expected = {"a": 7, "b": 1e-3, "c": "off", "d": "007", "e": [1, {"f": True}], "g": None}
    config = read(tmp_path, task % written, ["--task.options.i", "False"])
    options = value(config, "tasks.reasoning.options")
    assert options == {**expected, "h": -2, "i": False}
    assert [type(options[k]) for k in "abi"] == [int, float, bool]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("schedule: {steps: 3}\nseed: 1\nschedule: {packing: true}\n", ("'schedule'", "line 3")),
        ("schedule:\n  steps: 3\n  steps: 4\n", ("the key 'steps' occurs twice", "line 3")),
        ("tasks: {a: {kind: arithmetic}, a: {kind: arithmetic}}", ("'a' occurs twice", "line 1")),
        (b"output_dir: runs/caf\xe9\n", ("run.yaml: not valid YAML",)),
        (b"output_dir: runs/\x07\n", ("run.yaml: not valid YAML",)),
        ("recipe: [dapo]", ("no such recipe",)),
    ],
)
def test_a_file_that_would_be_misread_is_refused(
    tmp_path: Path, text: str | bytes, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as e:
        read(tmp_path, text)
    for part in parts:
        assert part in str(e.value)


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file: Is a directory"):
        load_config(tmp_path)


def test_marks_of_the_encoding_and_merged_keys_are_read(tmp_path: Path) -> None:
    for encoding in ("utf-8-sig", "utf-16"):
        assert read(tmp_path, "seed: 7\n".encode(encoding)).seed == 7, encoding
    tasks = "tasks:\n  a: &a {kind: arithmetic, weight: 2}\n  b: {<<: *a, weight: 3}\n"
    assert [task.weight for task in read(tmp_path, tasks).tasks.values()] == [2, 3]


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    text = "output_dir: ~/runs/x\nmodel: ~/model\ntask: {kind: jsonl, path: ~/a.jsonl}\n"
    config = read(tmp_path, text, ["--weights.directory", "~/w", "--sft.source=~/rows.jsonl"])
    assert (config.output_dir, config.model) == (tmp_path / "runs" / "x", f"{tmp_path}/model")
    assert value(config, "tasks.jsonl.path") == tmp_path / "a.jsonl"
    assert config.weights.directory == tmp_path / "w"
    assert config.sft.source == f"{tmp_path}/rows.jsonl"
    config = read(tmp_path, "sft: {against: [~/a.jsonl, aime2024]}\n")
    assert config.sft.against == (f"{tmp_path}/a.jsonl", "aime2024")
    assert read(tmp_path, "output_dir: runs/~/x\n").output_dir == Path("runs/~/x")


def test_a_section_without_keys_has_its_values(tmp_path: Path) -> None:
    assert read(tmp_path, "schedule:\nevaluation: {sets: }\nverifier: {values: ~}\n") == RunConfig()
    recipe = load_config(None, ["--recipe", "dapo"])
    empty = "recipe: dapo\nschedule:\nalgorithm: {loss: }\noptimizer:\n"
    assert read(tmp_path, empty) == recipe
    with pytest.raises(ConfigError, match="schedule.steps is None"):
        read(tmp_path, "schedule: {steps: }\n")


def test_a_pair_given_as_two_words_is_refused_with_a_hint(tmp_path: Path) -> None:
    for options, remedy in (
        (["--generation.thinking_budget_tokens", "10", "12"],
         "--generation.thinking_budget_tokens 10,12"),
        (["--metrics.token_dump_steps=0", "5", "--seed", "3"], "--metrics.token_dump_steps 0,5"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="is not an option; write the values as one") as e:
            load_config(None, options)
        assert remedy in str(e.value)
    with pytest.raises(
        ConfigError, match=r"thinking_budget_tokens is '10 12'.*; write it as \[1, 2\]"
    ):
        read(tmp_path, "generation: {thinking_budget_tokens: 10 12}\n")
    with pytest.raises(ConfigError, match="12 is not an option; use --KEY VALUE"):
        load_config(None, ["--seed", "3", "12"])


def test_a_saved_configuration_of_odd_texts_is_the_same(tmp_path: Path) -> None:
    odd = ["--task.subset", "off", "--task.revision", "0123", "--task.template", "null: {prompt}"]
    odd += ["--task.split", "~", "--generation.think_start", "", "--output_dir", str(tmp_path)]
    config = load_config(None, [*TASK, *odd])
    assert load_config(save_config(config)) == config
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["seed"] == 1234


def test_a_recipe_file_is_read_like_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("summary: s\nsource: s\nvalues: {metrics: {wandb: off}, seed: 0123}\n")
    config = load_config(None, ["--recipe", str(path)])
    assert (config.metrics.wandb, config.seed) == ("off", 123)
    path.write_text("summary: s\nsource: s\nsource: t\nvalues: {}\n")
    with pytest.raises(ConfigError, match="'source' occurs twice"):
        load_config(None, ["--recipe", str(path)])


def test_sequences_longer_than_the_model_are_refused_by_the_plan(tmp_path: Path) -> None:
    def plan(*options: str) -> Any:
        return CliRunner().invoke(app, ["train", "--plan", *options])

    def budgets(prompt: int, model: str) -> list[str]:
        keys = ("max_prompt_tokens", "thinking_budget_tokens", "answer_budget_tokens")
        values = (str(prompt), "100,100", "20")
        given = [w for k, v in zip(keys, values, strict=True) for w in (f"--generation.{k}", v)]
        phrase = ["--generation.interruption_phrase", "</think>"]
        return ["--model", model, *given, *phrase]

    refused = plan()
    assert isinstance(refused.exception, ConfigError)
    budget = "thinking_budget_tokens = [10240, 12288]"
    keys = ("max_prompt_tokens = 2048", budget, "answer_budget_tokens = 2048")
    for key in (*keys, "interruption_phrase (81", "256 positions"):
        assert key in str(refused.exception)
    # 127 + 100 + 20 + 8 = 255 tokens, one less than the positions of the tiny models.
    assert plan(*budgets(127, "tiny_dense")).exit_code == 0
    assert isinstance(plan(*budgets(128, "tiny_dense")).exception, ConfigError)
    named = budgets(128, "qwen3-8b")
    assert plan(*named).exit_code == 0
    # The start checkpoint is the model, also where its positions are in `text_config`.
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 250}}')
    refused = plan(*named, "--start_checkpoint", str(tmp_path))
    assert "250 positions" in str(refused.exception)
    (tmp_path / "config.json").write_text("{")
    assert "give a Hugging Face directory" in str(plan(*budgets(1, str(tmp_path))).exception)
