"""The model that `evaluate` finds at a path, its evaluation sets, and its errors."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.commands.evaluate.evaluation_run import find_source, load_sets
from megatron_rl.config import ConfigError, RunConfig, load_config, save_config
from megatron_rl.data.prompt_format import PromptFormat, read_format, save_tiny_tokenizer
from megatron_rl.data.question import DataError
from megatron_rl.files import size_and_sum
from megatron_rl.metrics.metrics_file import MetricsWriter
from megatron_rl.models import run_checkpoint

SMALL = ["--task.heldout_prompts", "5", "--task.train_prompts", "100"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make the folder of a run with two checkpoints, a torn one and a final model."""
    folder = tmp_path / "run"
    config = load_config(None, ["--output_dir", str(folder), "--seed", "7", *SMALL])
    save_config(config)
    for step in (8, 16):
        path = folder / "checkpoints" / f"step_{step:06d}"
        (path / "model").mkdir(parents=True)
        (path / "model" / "__0_0.distcp").write_bytes(bytes(range(100)))
        sums = {"model/__0_0.distcp": size_and_sum(path / "model" / "__0_0.distcp")}
        run_checkpoint.complete(path, step, {}, sums)
    (folder / "checkpoints" / "step_000024").mkdir()
    (folder / "checkpoints" / "step_000032.tmp").mkdir()
    final = folder / "final"
    final.mkdir()
    (final / "config.json").write_text("{}")
    (final / "model.safetensors").touch()
    (folder / "summary.json").write_text(json.dumps({"steps": 16}))
    with closing(MetricsWriter(folder / "metrics.jsonl")) as writer:
        writer.write("eval", {"step": 0, "compute_tokens": 0, "pass_rate": 0.1})
        writer.write("step", {"step": 7, "compute_tokens": 80, "loss": 0.0})
        writer.write("step", {"step": 15, "compute_tokens": 160, "loss": 0.0})
        writer.write("eval", {"step": 16, "compute_tokens": 160, "pass_rate": 0.4})
    return folder


def test_the_saved_configuration_says_the_same_as_the_one_that_ran(tmp_path: Path) -> None:
    config = load_config(None, ["--output_dir", str(tmp_path), "--recipe", "dapo"])
    assert load_config(save_config(config)) == config


def test_a_runs_folder_means_its_newest_complete_checkpoint(run: Path) -> None:
    source = find_source(run, None, [])
    assert source.path == run / "checkpoints" / "step_000016"
    assert source.is_megatron
    assert (source.step, source.run) == (16, run)
    assert source.config.seed == 7


def test_a_checkpoint_and_the_final_model_know_their_run_and_step(run: Path) -> None:
    checkpoint = find_source(run / "checkpoints" / "step_000008", None, [])
    assert (checkpoint.step, checkpoint.run) == (8, run)
    final = find_source(run / "final", None, [])
    assert (final.step, final.run, final.is_megatron) == (16, run, False)


def test_a_moved_run_is_found_and_options_win(run: Path, tmp_path: Path) -> None:
    moved = run.rename(tmp_path / "moved")
    source = find_source(moved, None, ["--generation.answer_budget_tokens", "3"])
    assert source.config.output_dir == moved
    assert source.config.generation.answer_budget_tokens == 3


def test_compute_and_evaluation_are_those_of_the_weight_version(run: Path) -> None:
    first, newest = (
        find_source(run / "checkpoints" / "step_000008", None, []),
        find_source(run, None, []),
    )
    assert first.compute == {"compute_tokens": 80} and first.evaluation is None
    assert newest.compute == {"compute_tokens": 160}
    assert newest.evaluation is not None and newest.evaluation["pass_rate"] == 0.4
    (run / "checkpoints" / "step_000008").rename(run / "checkpoints" / "step_000009")
    other = run / "checkpoints" / "step_000009"
    run_checkpoint.complete(other, 9, {}, {})
    assert find_source(other, None, []).compute == {}


def test_a_torn_checkpoint_is_passed_over_unless_it_was_chosen(run: Path) -> None:
    newest = run / "checkpoints" / "step_000016"
    (newest / "trainer.json").write_text('{"format": 2, "st')
    assert find_source(run, None, []).step == 8
    with pytest.raises(ConfigError, match="step_000016 has no readable trainer.json"):
        find_source(newest, None, [])


@pytest.mark.parametrize("command", ["evaluate", "convert"])
def test_nothing_is_made_of_a_damaged_checkpoint(run: Path, tmp_path: Path, command: str) -> None:
    newest = run / "checkpoints" / "step_000016"
    file = newest / "model" / "__0_0.distcp"
    whole = file.read_bytes()
    target = tmp_path / "converted"
    for damaged, seen in (
        (whole[:50], "it has 50 of 100 bytes"),
        (bytes([1]) + whole[1:], "its bytes were changed after it was written (checksum)"),
        (None, "No such file or directory"),
    ):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        targets = ["--huggingface", str(target)] if command == "evaluate" else [str(target)]
        done = CliRunner().invoke(app, [command, str(newest), *targets])
        assert done.exit_code == 2, done.output
        assert f"{file}: {seen}: {newest} is damaged; take another: step_000008" in done.stderr
        assert not target.exists()


def test_a_hugging_face_directory_without_a_run_has_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    source = find_source(tmp_path, None, ["--evaluation.samples_per_prompt", "3"])
    assert source.config.model == str(tmp_path)
    assert (source.run, source.step) == (None, None)
    assert source.config.evaluation.samples_per_prompt == 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "no such directory"),
        ("empty", "neither a Hugging Face directory"),
        ("no_run", "no complete checkpoint"),
        ("no_config", "give the run's configuration with --config"),
    ],
)
def test_what_cannot_be_evaluated_is_named(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_run" / "checkpoints" / "step_000001").mkdir(parents=True)
    (tmp_path / "no_config").mkdir()
    (tmp_path / "no_config" / "trainer.json").write_text('{"step": 1}')
    with pytest.raises(ConfigError, match=message):
        find_source(tmp_path / path, None, [])
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / path)])
    assert done.exit_code == 2
    assert message in done.stderr


def test_the_command_asks_for_data_where_there_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path)])
    assert done.exit_code == 2 and "belongs to no run" in done.stderr
    done = CliRunner().invoke(
        app, ["evaluate", str(tmp_path), "--data", "x.jsonl", "--fit", str(tmp_path / "f.jsonl")]
    )
    assert done.exit_code == 2 and "how much compute" in done.stderr


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[RunConfig, Tokenizer, PromptFormat]:
    save_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    return load_config(None, SMALL), tokenizer, read_format(tmp_path, "<think>")


def test_sets_are_the_runs_own_and_files_by_name(tmp_path: Path, tiny: Any) -> None:
    path = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"1+{i}=?", "answer": str(1 + i), "level": i % 2} for i in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sets = load_sets(["run", str(path)], *tiny, kind="exact", limit=3)
    assert {name: len(prompts) for name, prompts in sets.items()} == {"run": 3, "sums": 3}
    (_, first), (_, second), _ = sets["sums"]
    assert first.text == "<bos>1+0=?<think>" and first.question.gold == "1"
    assert first.question.kind == "exact" and first.question.meta == {"eos": "<eos>"}
    assert second.question.difficulty == "1"


def test_sets_of_one_name_are_refused(tiny: Any) -> None:
    with pytest.raises(DataError, match="named twice"):
        load_sets(["run", "run"], *tiny, kind="math", limit=None)
