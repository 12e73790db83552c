"""`megatron-rl sft` on rows: equal to a plain loop in every layout, resumed exactly.

The model directories have random weights and the architectures of Llama and Llama 4.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.data.examples import Examples, Position
from megatron_rl.trainer import checkpoint_folder
from megatron_rl.trainer.sft import learning_rate, run_stage
from tests.trainer.cases import world_of_one
from tests.trainer.sft_cases import (
    as_row,
    conversations,
    sft_config,
    write_models,
    write_rows,
)
from tests.trainer.sft_worker import LAYOUTS
from tests.workers import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which two processes ran the stage in all layouts."""
    folder = tmp_path_factory.mktemp("sft")
    write_models(folder)
    write_rows(folder / "rows.jsonl", [as_row(turns) for turns in conversations()])
    run_ranks("tests.trainer.sft_worker", 2, folder, seconds=500)
    return folder


def log(directory: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "sft.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def plain_loop(model_directory: Path, source: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with torch and transformers alone, one unpadded sequence at a time."""
    from transformers import AutoModelForCausalLM

    config = sft_config(model_directory, source)
    model = AutoModelForCausalLM.from_pretrained(
        model_directory, dtype=torch.float32, attn_implementation="eager"
    )
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, config.sft.beta2), eps=1e-8)
    steps = Examples(config, model_directory).steps(Position())
    losses = []
    for step in range(config.sft.steps):
        examples, _ = next(steps)
        assert sum(len(p) + len(c) for p, c in examples) <= config.sft.tokens_per_step
        count = sum(len(completion) for _, completion in examples)
        optimizer.zero_grad()
        loss = torch.zeros(())
        for prompt, completion in examples:
            ids = torch.tensor([[*prompt, *completion]])
            labels = ids.clone()
            labels[0, : len(prompt)] = -100
            loss = loss + model(ids, labels=labels).loss * (len(completion) / count)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_every_layout_has_the_losses_of_a_plain_loop(folder: Path) -> None:
    plain = {
        model: plain_loop(folder / model, folder / "rows.jsonl")
        for model in {model for model, _ in LAYOUTS.values()}
    }
    for layout, (model, _) in LAYOUTS.items():
        losses, weights = plain[model]
        rows = log(folder / layout)
        differences = [abs(row["loss"] - loss) for row, loss in zip(rows, losses, strict=True)]
        print(layout, [f"{d:.1e}" for d in differences], f"loss {losses[0]:.3f}-{losses[-1]:.3f}")
        assert max(differences) <= TOLERANCE, (layout, differences)
        tensors = load_file(folder / layout / "final" / "model.safetensors")
        assert tensors.keys() == load_file(folder / model / "model.safetensors").keys(), layout
        start = load_file(folder / model / "model.safetensors")
        for name in ("model.norm.weight", "model.embed_tokens.weight"):
            moved = (weights[name] - start[name]).abs().max()
            assert moved > 5e-4, name
            assert (tensors[name] - weights[name]).abs().max() < 0.1 * moved, (layout, name)


def test_a_resumed_stage_equals_an_uninterrupted_one_bit_for_bit(folder: Path) -> None:
    for layout in LAYOUTS:
        whole, resumed = folder / layout, folder / f"{layout}_resumed"
        assert [row["step"] for row in log(whole)] == list(range(5))
        assert log(resumed) == log(whole), layout
        final = Path("final") / "model.safetensors"
        assert (resumed / final).read_bytes() == (whole / final).read_bytes(), layout
        assert {p.name for p in (resumed / "checkpoints").glob("step_*")} == {
            *("step_000002", "step_000004", "step_000005"),
        }
        state = json.loads((whole / "checkpoints" / "step_000005" / "supervised.json").read_text())
        assert state["epoch"] > 0  # the order of the second epoch is in the comparison


def test_the_result_is_a_start_checkpoint_of_a_run(folder: Path) -> None:
    from megatron_rl.models.start_checkpoint import needs_supervised_stage, start_directory

    final = folder / "TP2" / "final"
    config = sft_config("tiny_dense", folder / "rows.jsonl", start_checkpoint=final)
    assert start_directory(config) == final
    assert not needs_supervised_stage(config)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (final / name).read_bytes() == (folder / "tiny_dense" / name).read_bytes()


def test_a_run_may_begin_with_the_stage_from_a_given_model(folder: Path, tmp_path: Path) -> None:
    from megatron_rl.models import start_checkpoint as start

    base = folder / "tiny_dense"
    rows = folder / "rows.jsonl"
    config = sft_config("tiny_dense", rows, start_checkpoint=base, sft__first=True)
    config.output_dir = tmp_path
    made = tmp_path / "start" / "tiny_dense"
    assert (start.base_directory(config), start.start_directory(config)) == (base, made)
    assert start.needs_supervised_stage(config)
    made.mkdir(parents=True)
    start.mark_made(config, made)
    assert not start.needs_supervised_stage(config)
    config.start_checkpoint = folder / "TP2" / "final"
    assert start.start_directory(config) == tmp_path / "start" / "final"
    config.sft.first = False
    assert start.start_directory(config) == folder / "TP2" / "final"
    assert not start.needs_supervised_stage(config)


def test_tensors_of_other_tools_are_named_and_ignored(folder: Path) -> None:
    output = (folder / "ranks.log").read_text()
    notice = "tiny_dense_tuned has 3 tensors that the model does not have"
    assert output.count(notice) == 8, output[-3000:]  # once per stage, on one rank
    assert "(lm_head.weight, model.layers.0.self_attn.rotary_emb.inv_freq, " in output


def test_tied_embeddings_with_another_head_are_refused(folder: Path, tmp_path: Path) -> None:
    from megatron_rl.trainer.model import Policy

    tensors = load_file(folder / "tiny_dense_tuned" / "model.safetensors")
    shutil.copytree(folder / "tiny_dense_tuned", directory := tmp_path / "model")
    tensors["lm_head.weight"][7, 0] += 1.0
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = sft_config(directory, folder / "rows.jsonl")
    with (
        world_of_one(config),
        pytest.raises(
            ValueError, match=r"another lm_head\.weight than.*tie_word_embeddings to fal"
        ),
    ):
        Policy(config, directory)


def test_an_interrupted_stage_resumes_and_bad_rows_end_it_early(folder: Path) -> None:
    def config(name: str, source: str = "rows.jsonl", **overrides: Any) -> RunConfig:
        options = {"output_dir": folder / name, **overrides}
        return sft_config(folder / "tiny_dense", folder / source, **options)

    calls = iter(range(99))
    write_rows(folder / "bad.jsonl", [{"prompt": "1+1=?"}])
    write_rows(folder / "none.jsonl", [])
    whole, parts = config("whole"), config("parts")
    with world_of_one(whole):
        assert run_stage(whole, 0, lambda: False)
        assert not run_stage(parts, 0, lambda: next(calls) == 3)
        assert [row["step"] for row in log(folder / "parts")] == [0, 1, 2]
        assert not (folder / "parts" / "final").exists()
        assert run_stage(config("parts", resume=True), 0, lambda: False)
        for source, message in (
            ("bad.jsonl", r"sft: .*bad\.jsonl: bad\.jsonl:1: no response"),
            ("none.jsonl", r"sft: no row to train on in .*none\.jsonl: 0 rows"),
            ("nowhere.jsonl", r"sft: .*nowhere\.jsonl: no such file"),
        ):
            with pytest.raises(ConfigError, match=message):
                run_stage(config("refused", source), 0, lambda: False)
        for path in checkpoint_folder.find_complete(folder / "parts" / "checkpoints"):
            about = checkpoint_folder.read_about(path)  # that of a run has no such file
            about["files"].pop("supervised.json")
            (path / "supervised.json").unlink()
            work = path.rename(path.with_suffix(".tmp"))
            checkpoint_folder.put_in_place(work, about["step"], about["layout"], about["files"])
        with pytest.raises(ConfigError, match=r"supervised\.json does not exist: .* another stage"):
            run_stage(config("parts", resume=True), 0, lambda: False)
    assert log(folder / "parts") == log(folder / "whole")
    final = Path("final") / "model.safetensors"
    assert (folder / "parts" / final).read_bytes() == (folder / "whole" / final).read_bytes()
