"""The memory of an engine's process does not grow with the completions that it makes."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from tests.generator import tiny_models
from tests.generator.conftest import needs_vllm, run_config, running_engine
from tests.generator.test_engine import prompt

pytestmark = [pytest.mark.e2e, needs_vllm]
AT_ONCE, WARM, ROUNDS = 32, 6, 18
MEBIBYTES = 30.0
"""Limit of the growth; without a limit of oneDNN's cache it is 80 and goes on."""


def test_memory_stays_once_the_cache_of_keys_and_values_was_used(tmp_path):
    model_dir = tiny_models.save("llama", 0, tmp_path)
    with running_engine(run_config(model_dir), model_dir) as (engine, loop):
        (core,) = engine.cores
        process, sizes = psutil.Process(core.pid), list[float]()

        async def complete() -> None:
            await asyncio.gather(*[engine.complete(prompt(i), 34, 6, 1.0) for i in range(AT_ONCE)])

        for _ in range(WARM + ROUNDS):
            loop.run_until_complete(asyncio.wait_for(complete(), 120))
            sizes.append(process.memory_info().rss / 2**20)
        grown = sizes[-1] - sizes[WARM - 1]
        assert grown < MEBIBYTES, f"{grown:.0f} MiB more: {sizes}"
