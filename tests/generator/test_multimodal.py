"""A multimodal Llama 4 (vision tower included): the engine's log-probs equal the trainer's."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config import RunConfig
from tests.generator import tiny_models
from tests.generator.conftest import Ask, needs_vllm, run_config, running_engine
from tests.trainer.cases import write_multimodal

pytestmark = [pytest.mark.e2e, needs_vllm, pytest.mark.timeout(300)]
TOLERANCE = 1e-4
PROMPTS = [[1, *(8 + (7 * i + 3 * j) % 20 for j in range(9 + i)), 4] for i in range(8)]
COMPLETIONS = [[8 + (5 * i + 11 * j) % 20 for j in range(30)] for i in range(8)]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    sizes = {"max_position_embeddings": 512, "intermediate_size": 128}
    tiny_models.tokenizer().save_pretrained(write_multimodal(directory, **sizes))
    assert any("vision_model" in name for name in tiny_models.checkpoint(directory))
    return directory


@pytest.fixture
def torchvision() -> None:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("vLLM's class of the multimodal Llama 4 needs torchvision")


def config_of(model_dir: Path, params: str, width: int) -> RunConfig:
    tree = run_config(model_dir).model_dump(mode="json")
    tree["precision"]["params"] = params
    tree["roles"] |= {"generator_ranks": width, "generator_tensor_parallel": width}
    return RunConfig.model_validate(tree)


def show_the_head_alone(directory: Path) -> None:
    """Make every hidden state exact in bf16: layers add zero, the embedding is +-1."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
            tensor.zero_()
        elif name.endswith("embed_tokens.weight"):
            tensor.sign_()
        elif name == "language_model.model.norm.weight":
            tensor.fill_(1.0)
    save_file(tensors, path, metadata={"format": "pt"})


def difference(scores: Any, expected: Any) -> float:
    _, found = scores
    return (torch.tensor(found) - torch.tensor(expected)).abs().max().item()


def test_log_probs_equal_the_trainers_before_and_after_an_update(
    model_dir, torchvision, trainer: Ask, tmp_path
):
    examples = list(zip(PROMPTS, COMPLETIONS, strict=True))
    trainer("start", str(model_dir), 0)
    trainer("open", {"directory": str(tmp_path / "weights")})
    expected = [trainer("score", examples)]
    trainer("train")
    manifest = trainer("publish")
    expected.append(trainer("score", examples))
    with running_engine(config_of(model_dir, "fp32", 1), model_dir) as (engine, loop):

        async def work() -> list[Any]:
            before = await engine.score(PROMPTS, COMPLETIONS)
            await engine.update(manifest)
            return [before, await engine.score(PROMPTS, COMPLETIONS)]

        scores = loop.run_until_complete(asyncio.wait_for(work(), 100))
    errors = [difference(*pair) for pair in zip(scores, expected, strict=True)]
    print(f"errors before and after an update: {errors}")
    assert difference((0, expected[0]), expected[1]) > 10 * TOLERANCE
    assert max(errors) < TOLERANCE


def test_bf16_weights_have_an_fp32_head_on_every_worker(model_dir, torchvision, trainer: Ask):
    show_the_head_alone(model_dir)
    trainer("start", str(model_dir), 0, "bf16")
    expected = trainer("score", list(zip(PROMPTS, COMPLETIONS, strict=True)))
    with running_engine(config_of(model_dir, "bf16", 2), model_dir) as (engine, loop):
        work = asyncio.wait_for(engine.score(PROMPTS, COMPLETIONS), 100)
        error = difference(loop.run_until_complete(work), expected)
    print(f"error with bf16 weights: {error}")
    assert error < TOLERANCE


HIDDEN = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name == "torchvision" else find(name, *rest)
"""
"""`sitecustomize` of an interpreter in which torchvision is not installed."""


def test_a_package_that_vllms_class_lacks_is_named(model_dir, tmp_path, monkeypatch):
    from megatron_rl.generator.vllm_args import check_model_class

    # vLLM imports the class in another process, and its cache folder has earlier results.
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="install what is missing") as error:
        check_model_class(str(model_dir))
    assert "vLLM cannot import its class Llama4ForConditionalGeneration" in str(error.value)
    assert "No module named 'torchvision'; install what is missing" in str(error.value)
