"""What the role tells the orchestrator, and how it ends; the engine is a fake."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest

from megatron_rl import liveness
from megatron_rl.config import RunConfig
from megatron_rl.generator import serve
from megatron_rl.generator.serve import Generator
from megatron_rl.messages import (
    Failed,
    Generate,
    GeneratorStats,
    Hello,
    Manifest,
    Sample,
    SaveState,
    Stop,
    UpdateWeights,
    VersionSpan,
)
from megatron_rl.weights.manifest import WeightsError
from tests.router import Router


class FakeEngine:
    """Answers at once, counts, and fails where a test wants it to."""

    running = most = 0
    fails_to_start = False
    stopped = 0
    routes = None
    cores = ()

    def __init__(self, config, index, model_dir):
        if FakeEngine.fails_to_start:
            raise RuntimeError("Engine core initialization failed")
        self.version = self.aborted = 0

    async def prepare(self):
        pass

    async def complete(self, prompt, thinking_budget, answer_budget, temperature):
        FakeEngine.running += 1
        FakeEngine.most = max(FakeEngine.most, FakeEngine.running)
        try:
            await asyncio.sleep(0.002 if thinking_budget < 1000 else 3600)
        finally:
            FakeEngine.running -= 1
            if thinking_budget == 1001:
                raise RuntimeError("EngineCore died")
        return SimpleNamespace(
            token_ids=[5], logprobs=[-0.5], forced=(0, 0), spans=[VersionSpan(0, 0, 1)],
            finish_reason="stop",
        )  # fmt: skip

    async def update(self, manifest, folder):
        raise WeightsError(f"weights version {manifest.version} is not complete in {folder}")

    def stop(self):
        FakeEngine.stopped += 1


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    module = SimpleNamespace(Engine=FakeEngine)
    monkeypatch.setitem(sys.modules, "megatron_rl.generator.engine", module)
    monkeypatch.setattr(FakeEngine, "most", 0)
    monkeypatch.setattr(FakeEngine, "stopped", 0)
    monkeypatch.setattr(FakeEngine, "fails_to_start", False)


def config(**timeouts: float) -> RunConfig:
    return RunConfig(generation={"concurrent_completions": 4}, timeouts=timeouts)


def generate(group: int = 0, thinking: int = 10, temperature: float = 1.0) -> Generate:
    return Generate(group=group, prompt_id=0, prompt=[1], thinking_budgets=[thinking] * 8,
                    answer_budget=4, temperature=temperature)  # fmt: skip


def play(conversation, run_config: RunConfig):
    """Run the role against `conversation(send, receive)`; what it received and the role's error."""

    async def work():
        received: list[object] = []
        with closing(Router()) as router:
            generator = Generator(run_config, 0, 2, router.endpoint, "host-1")
            role = asyncio.create_task(generator.run("unused"))

            async def receive(kind):
                while True:
                    if (arrived := router.receive(0)) is None:
                        await asyncio.sleep(0.005)
                        continue
                    received.append(arrived[1])
                    if isinstance(received[-1], kind):
                        return received[-1]

            async def send(message):
                router.send("generator-0", message)

            async with asyncio.timeout(20):
                await conversation(send, receive, router)
                (error,) = await asyncio.gather(role, return_exceptions=True)
        return received, error

    return asyncio.run(work())


def test_completions_are_bounded_and_answered_one_by_one_until_stop():
    async def conversation(send, receive, router):
        hello = await receive(Hello)
        assert (hello.capacity, hello.node) == (4, "host-1")
        await send(generate(0))
        await send(generate(1))
        for _ in range(16):
            await receive(Sample)
        await send(Stop())

    received, error = play(conversation, config())
    assert error is None
    assert FakeEngine.most == 4
    assert [m.group for m in received if isinstance(m, Sample)] == [0] * 8 + [1] * 8
    assert FakeEngine.stopped == 1


def test_it_signs_while_it_waits_and_completes_and_not_while_its_engine_hangs(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(liveness.FOLDER, str(tmp_path / "node"))
    monkeypatch.setattr(liveness, "_INTERVAL", 0.0)
    monkeypatch.setattr(liveness, "_signer", None)
    monkeypatch.setattr(serve, "STATS_SECONDS", 0.05)
    liveness.begin(config(), "generator", 2)

    async def conversation(send, receive, router):
        async def signs(beats=4):
            """Return the states and times of the signs over some beats of the role's loop."""
            states, times = set(), set()
            for _ in range(beats):
                await receive(GeneratorStats)
                (sign,) = liveness.signs(tmp_path / "node").values()
                states.add(sign.state)
                times.add(sign.time)
            return states, len(times)

        await receive(Hello)
        states, times = await signs()
        assert (states, times > 1) == ({"waiting"}, True)
        await send(generate(0))
        for _ in range(8):
            await receive(Sample)
        await send(generate(1, thinking=2000))  # completes in an hour
        await signs()
        assert await signs() == ({"generating"}, 1)
        await send(Stop())

    assert play(conversation, config())[1] is None


def test_stop_ends_the_role_while_requests_run_and_the_engine_dies():
    async def conversation(send, receive, router):
        await receive(Hello)
        await send(generate(0, thinking=1001))
        await asyncio.sleep(0.1)
        await send(Stop())

    received, error = play(conversation, config())
    assert error is None
    assert not any(isinstance(m, Failed) for m in received)
    assert FakeEngine.stopped == 1


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            UpdateWeights(manifest=Manifest(version=3, root="/x", buckets=(), nodes=()),
                          folder="/dev/shm/node"),
            "generator 0 (rank 2): WeightsError: weights version 3 is not complete in"
            " /dev/shm/node",
        ),
        (generate(temperature=0.7), "temperature 0.7, but log-probs are computed for"),
        (SaveState(step=1, directory=""), "a generator does not answer SaveState"),
    ],
)  # fmt: skip
def test_any_error_is_reported_and_ends_the_role(message, text):
    async def conversation(send, receive, router):
        await receive(Hello)
        await send(generate(0, thinking=1000))
        await send(message)
        assert text in (await receive(Failed)).error

    _, error = play(conversation, config())
    assert isinstance(error, Exception)
    assert FakeEngine.stopped == 1


def test_an_engine_that_does_not_start_is_reported():
    FakeEngine.fails_to_start = True

    async def conversation(send, receive, router):
        assert "Engine core initialization failed" in (await receive(Failed)).error

    _, error = play(conversation, config())
    assert isinstance(error, RuntimeError)


def test_an_orchestrator_that_is_gone_ends_the_role():
    async def conversation(send, receive, router):
        await receive(Hello)
        router.close()

    _, error = play(conversation, config(shutdown_seconds=0.4))
    assert isinstance(error, ConnectionError)
    assert "timeouts.shutdown_seconds" in str(error)
    assert FakeEngine.stopped == 1
