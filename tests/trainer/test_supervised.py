"""The supervised stage: token-mean cross-entropy, its schedule, and the directory it leaves."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config import RunConfig
from megatron_rl.data.examples import Position
from megatron_rl.trainer.hf_checkpoint import save_huggingface
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.sft import ExampleFeed, learning_rate, run_supervised
from tests.trainer.cases import run_config, world_of_one, write_model

EXAMPLES = [([1, 5, 6], [7, 2]), ([1, 9], [3, 4, 5, 2]), ([1, 8, 8, 8], [2])]


def feed(config: RunConfig) -> ExampleFeed:
    return ExampleFeed(
        config, ((EXAMPLES, Position(rows=3 * i)) for i in itertools.count(1)), Position()
    )


def test_the_first_step_is_adamw_on_the_token_mean(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path / "hf", "tiny_scout")
    config = run_config(
        directory,
        sft__steps=1,
        sft__warmup_steps=0,
        sft__learning_rate=1e-2,
        optimizer__eps=1e-15,
        generation__temperature=0.5,
    )
    with world_of_one(config):
        policy = Policy(config, directory)
        seen: list[dict[str, Any]] = []
        run_supervised(config, policy, feed(config), seen.append)
        save_huggingface(policy, tmp_path / "out", directory)
        constants = [(g["betas"], g["eps"]) for g in policy.optimizer.param_groups]
    assert all(c == ((0.9, 0.999), 1e-15) for c in constants)

    # The same step by torch, one sequence at a time, at temperature 1.
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": config.optimizer.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, 1e-2, betas=(0.9, config.sft.beta2), eps=1e-8)
    total = sum(len(completion) for _, completion in EXAMPLES)
    loss = torch.zeros(())
    for prompt, completion in EXAMPLES:
        ids = torch.tensor([*prompt, *completion])
        rows = torch.arange(len(prompt), len(ids))
        logp = torch.log_softmax(model(ids[None]).logits[0], -1)[rows - 1, ids[rows]]
        loss = loss - logp.sum() / total
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert [(row["step"], row["tokens"], row["response_tokens"]) for row in seen] == [(0, 16, 7)]
    assert seen[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for (name, want), (_, found) in zip(
        model.named_parameters(), after.named_parameters(), strict=True
    ):
        # The gradients' own error of 1e-6 is what Adam sees where a gradient is about as small.
        clear = want.grad.abs() > 1e-5
        torch.testing.assert_close(found[clear], want[clear], atol=2e-4, rtol=0, msg=name)


def test_a_few_steps_learn_to_copy_and_the_loss_is_reported(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "hf", "tiny_dense")
    config = run_config(directory, sft__steps=45, sft__learning_rate=3e-3, sft__warmup_steps=5)
    seen: list[dict[str, Any]] = []
    with world_of_one(config):
        assert run_supervised(config, Policy(config, directory), feed(config), seen.append)
    assert [row["step"] for row in seen] == list(range(45))
    assert seen[-1]["loss"] < 0.5 * seen[0]["loss"]


def test_learning_rate_warms_up_and_ends_at_a_tenth(tmp_path: Path) -> None:
    config = run_config("tiny_dense", sft__steps=100, sft__warmup_steps=10)
    peak = config.sft.learning_rate
    rates = [learning_rate(config, step) / peak for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] <= 1.0
    assert rates[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    constant = run_config("tiny_dense", sft__warmup_steps=10, sft__final_rate_fraction=1.0)
    assert {learning_rate(constant, step) for step in (9, 500, 1599)} == {peak}


def test_a_saved_directory_is_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "hf", "tiny_dense")
    (directory / "tokenizer.json").write_text('{"t": 1}')
    config = run_config(directory)
    out = tmp_path / "runs" / "final"
    out.mkdir(parents=True)
    (out / "stale.bin").write_text("old")

    class Broken(Exception):
        pass

    def failing(*_: Any) -> Any:
        raise Broken

    with world_of_one(config):
        policy = Policy(config, directory)
        from megatron_rl.trainer import hf_checkpoint

        with pytest.raises(Broken):
            hf_checkpoint.write(out, directory, (failing() for _ in range(1)))
        assert (out / "stale.bin").exists()  # a save that fails leaves the old one as it was
        save_huggingface(policy, out, directory)
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    assert not any(p.name.endswith("old") for p in out.parent.iterdir())
