"""FP8 with block scales, from modelopt to vLLM: bounds, names, and an engine's log-probs."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megatron_rl.config import RunConfig
from megatron_rl.messages import Manifest
from tests.generator import tiny_models
from tests.generator.conftest import needs_vllm, run_config, running_engine
from tests.generator.fp8_process import SEEDS

pytestmark = [pytest.mark.e2e, needs_vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that `fp8_process` filled, after its own checks."""
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed")
    folder = tmp_path_factory.mktemp("fp8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.generator.fp8_process", str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert "QUANTIZED" in done.stdout, done.stderr[-4000:]
    return folder


def fp8_config(model_dir: Path) -> RunConfig:
    tree = run_config(model_dir).model_dump(mode="json")
    tree["weights"] |= {"dtype": "bf16", "quantization": "fp8"}
    return RunConfig.model_validate(tree)


def logprobs(directory: Path, prompts: list[list[int]], completions: list[list[int]]) -> Any:
    """Return the log-probs of all completion tokens by transformers in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    for p, c in zip(prompts, completions, strict=True):
        with torch.no_grad():
            every = torch.log_softmax(model(torch.tensor([p + c])).logits[0], -1)
        found.append(every[len(p) - 1 : -1].gather(1, torch.tensor(c)[:, None])[:, 0])
    return torch.cat(found)


def test_modelopts_fp8_is_within_half_a_unit_and_is_what_a_generator_expects(versions):
    assert (versions / "manifest0.json").exists()  # the checks are those of the process


def test_an_engine_computes_with_the_quantised_weights_of_each_version(versions):
    if not (torch.cuda.is_available() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("vLLM needs CUDA or AMX for FP8 block scales; neither is here")
    model_dir = tiny_models.save("qwen3_moe_fp8", 0, versions / "start")
    prompts = [[1, *(8 + (7 * i + 3 * j) % 20 for j in range(38)), 4] for i in range(8)]
    completions = [[8 + (5 * i + 11 * j) % 20 for j in range(30)] for i in range(8)]
    scores = []
    with running_engine(fp8_config(model_dir), model_dir) as (engine, loop):

        async def work() -> None:
            for version in range(len(SEEDS)):
                text = (versions / f"manifest{version}.json").read_bytes()
                await engine.update(msgspec.json.decode(text, type=Manifest))
                scores.append((await engine.score(prompts, completions))[1])

        loop.run_until_complete(asyncio.wait_for(work(), 200))
    flat = [torch.tensor([x for one in found for x in one]) for found in scores]
    for version, found in enumerate(flat):
        rounded, whole = (
            (found - logprobs(versions / f"{kind}{version}", prompts, completions)).abs().mean()
            for kind in ("rounded", "whole")
        )
        print(
            f"version {version}: mean error {rounded:.1e} to the quantized weights in fp32,"
            f" {whole:.1e} to the whole ones"
        )
        # The rest of the error is bf16's rounding of activations and routes.
        assert rounded < whole / 3
    # The same weights again: a layer that was not packed again would show. (The batches of the
    # engine vary, and bf16's rounding with them.)
    same, other = ((flat[0] - flat[i]).abs().mean() for i in (2, 1))
    print(f"the same version again: {same:.1e}, another one: {other:.1e}")
    assert same < other / 10
