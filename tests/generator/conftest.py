"""One engine per architecture for all tests of the folder: starting one takes half a minute."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config import RunConfig
from tests.generator import tiny_models
from tests.weights.versions import Versions, as_sent

# vLLM's import takes 9 s: a worker that runs no test with it must not import it to collect them.
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
Ask = Callable[..., Any]
KINDS = ["llama", "llama4", "qwen3", "qwen3_moe"]
"""Of `tiny_models`, one per architecture."""


def run_config(model_dir: Path, *, width: int = 1, **generation: Any) -> RunConfig:
    """Return a run with one engine of `width` ranks."""
    defaults = {
        "max_prompt_tokens": 100,
        "thinking_budget_tokens": (150, 150),
        "answer_budget_tokens": 20,
        "interruption_phrase": "(abc)</think>",
        "concurrent_completions": 32,
        "kv_cache_gib": 0.125,
    }
    return RunConfig(
        model=str(model_dir),
        precision={"params": "fp32"},
        roles={"generator_ranks": width, "generator_tensor_parallel": width},
        generation=defaults | generation,
    )


@dataclass
class Served:
    """An engine, the models of its versions, and its loop."""

    engine: Any
    kind: str
    loop: asyncio.AbstractEventLoop
    versions: Versions
    folder: Path
    models: dict[int, Any] = field(default_factory=dict)

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work(), 120))

    def make(self, seed: int) -> tuple[int, dict[str, torch.Tensor]]:
        """Make a version with random weights of this seed; return its number and its tensors."""
        version = max(self.models) + 1
        self.models[version] = tiny_models.build(self.kind, seed)
        return version, self.published(version)

    def publish(self, seed: int) -> Any:
        """Write a version with random weights of this seed; return its manifest.

        Only the newest two can be loaded.
        """
        return self.versions.write(*self.make(seed))

    def published(self, version: int) -> dict[str, torch.Tensor]:
        """Return a version's tensors as they travel."""
        self.models[version].save_pretrained(self.folder)
        return as_sent(tiny_models.checkpoint(self.folder))


async def held_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return the weights that an engine holds now (`tests.generator.held_weights`)."""
    from tests.generator import held_weights as imports_vllm

    return await imports_vllm.held_weights(engine)


@contextlib.contextmanager
def running_engine(config: RunConfig, model_dir: Path) -> Iterator[tuple[Any, Any]]:
    """Yield (engine, its loop), in an environment that is restored afterwards."""
    # Before the environment, which torch would read at its import, for all later tests.
    from megatron_rl.generator import vllm_args
    from megatron_rl.generator.engine import Engine
    from megatron_rl.generator.process_environment import prepare_environment
    from tests.generator.held_weights import EXTENSION

    environment = dict(os.environ)
    prepare_environment(config, str(model_dir))
    loop = asyncio.new_event_loop()

    async def start() -> Engine:
        engine = Engine(config, 0, str(model_dir))
        await engine.prepare()
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_args, "WORKER_EXTENSION", EXTENSION)
        engine = loop.run_until_complete(start())
    try:
        yield engine, loop
    finally:
        engine.stop()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        os.environ.clear()
        os.environ.update(environment)


@pytest.fixture(scope="session", params=KINDS)
def served(request, tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    model_dir = tiny_models.save(request.param, 0, folder / "v0")
    versions = Versions(folder / "weights", 100_000, owners=2)
    models = {0: tiny_models.build(request.param, 0)}
    with running_engine(run_config(model_dir), model_dir) as (engine, loop):
        yield Served(engine, request.param, loop, versions, folder / "scratch", models)
    versions.close()


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Yield a function that sends the trainer's process one command and returns its answer."""
    folder = tmp_path_factory.mktemp("trainer")
    with Listener(str(folder / "socket"), "AF_UNIX") as listener:
        log = (folder / "log.txt").open("w")
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.generator.trainer_process", str(folder / "socket")],
            cwd=Path(__file__).parents[2],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            listener._listener._socket.settimeout(200)  # type: ignore[attr-defined]
            connection = listener.accept()

            def ask(name: str, *arguments: Any) -> Any:
                connection.send((name, arguments))
                if not connection.poll(200):
                    pytest.fail((folder / "log.txt").read_text()[-6000:])
                try:
                    return connection.recv()
                except EOFError:
                    pytest.fail((folder / "log.txt").read_text()[-6000:])

            yield ask
            connection.close()
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            log.close()
