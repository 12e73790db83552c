"""What the role tells orchestrators, and how it ends; the engine is a fake."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from megatron_rl import liveness
from megatron_rl.algorithm.schedule import Schedule
from megatron_rl.config import RunConfig
from megatron_rl.generator import serve
from megatron_rl.generator.conversations import OrchestratorGoneError
from megatron_rl.generator.serve import Generator, OtherEngineError
from megatron_rl.messages import (
    Failed,
    Generate,
    GeneratorStats,
    Grown,
    Hello,
    Join,
    Leaving,
    Left,
    Manifest,
    Partial,
    Sample,
    SaveState,
    ScoreRequest,
    Stop,
    TurnLimits,
    UpdateWeights,
    VersionSpan,
    WeightsUpdated,
    Welcome,
    float_bytes,
    int_bytes,
    ints,
)
from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.store import node_name
from tests.router import Router

NAME = "generator-0"
TORN = 3
"""Version whose bytes are not there."""


class FakeEngine:
    """Answers at once, counts, and fails where a test wants it to."""

    made: list[FakeEngine] = []
    fails_to_start = False
    hangs = False
    routes = tokenizer = interruption = None
    max_tokens = 2000
    cores = ()

    def __init__(self, config, index, model_dir):
        if FakeEngine.fails_to_start:
            raise RuntimeError("Engine core initialization failed")
        self.version = self.aborted = self.running = self.most = self.stopped = self.cut = 0
        self.forgot = 0
        self.index, self.model_dir = index, model_dir
        self.begun: list[Partial | None] = []
        self.names: list[str] = []
        FakeEngine.made.append(self)

    async def prepare(self):
        pass

    async def complete(
        self, prompt, thinking_budget, answer_budget, temperature, begun, grown, name
    ):
        """Take an hour from a budget of 1000 on, and die after a moment with one of 1001."""
        self.running += 1
        self.most = max(self.most, self.running)
        self.begun.append(begun)
        self.names.append(name)
        try:
            if thinking_budget >= 1000 and grown:
                grown(
                    0,
                    Partial(
                        int_bytes([5, 6]),
                        float_bytes([-0.5, -0.25]),
                        [VersionSpan(0, 0, 2)],
                        (0, 0),
                    ),
                )
            await asyncio.sleep(0.002 if thinking_budget < 1000 else 3600)
        except asyncio.CancelledError:
            self.cut += 1
            if thinking_budget == 1001:
                raise RuntimeError("EngineCore died") from None
            raise
        finally:
            self.running -= 1
        return SimpleNamespace(
            token_ids=[thinking_budget], logprobs=[-0.5], forced=(0, 0),
            spans=[VersionSpan(0, 0, 1)], finish_reason="stop", routes_NLK=None,
        )  # fmt: skip

    async def score(self, prompts, completions):
        await asyncio.sleep(3600)

    async def update(self, manifest, folder):
        await asyncio.sleep(0.2)
        if manifest.version == TORN:
            raise WeightsError(f"weights version {TORN} is not complete in {folder}")
        self.version = manifest.version
        return WeightsUpdated(
            version=self.version, pause_seconds=0, transfer_seconds=0, requests_in_flight=0
        )

    async def forget_stores(self):
        self.forgot += 1

    async def check_alive(self, seconds):
        if FakeEngine.hangs:
            raise RuntimeError(f"the engine's core did not answer within {seconds} s")

    def stop(self):
        self.stopped += 1


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    module = SimpleNamespace(Engine=FakeEngine)
    monkeypatch.setitem(sys.modules, "megatron_rl.generator.engine", module)
    monkeypatch.setattr(FakeEngine, "made", [])
    for name in ("fails_to_start", "hangs"):
        monkeypatch.setattr(FakeEngine, name, False)


def the_engine() -> FakeEngine:
    """Return the engine, if there was one and it was stopped once at most."""
    (engine,) = FakeEngine.made
    assert engine.stopped <= 1
    return engine


def config(**timeouts: float) -> RunConfig:
    return RunConfig(generation={"concurrent_completions": 4}, timeouts=timeouts)


def generate(group: int = 0, thinking: int = 10, temperature: float = 1.0, **more) -> Generate:
    return Generate(group=group, prompt_id=0, prompt=[1], limits=[TurnLimits(thinking, 4)] * 8,
                    indices=list(range(8)), temperature=temperature,
                    **more)  # fmt: skip


def update(version: int) -> UpdateWeights:
    manifest = Manifest(version=version, root="/x", buckets=(), nodes=())
    return UpdateWeights(manifest=manifest, folder="/dev/shm/node")


class Conversation:
    """The orchestrator's side."""

    def __init__(self, run_config: RunConfig) -> None:
        self.router, self.config = Router(), run_config
        self.generator = Generator(
            self.router.endpoint, NAME, 3, 2, "process 1 on host-1", supervised=True
        )
        self.received: list[object] = []

    async def receive(self, *kinds):
        """Return the next message of these kinds."""
        while True:
            if (arrived := self.router.receive(0)) is None:
                await asyncio.sleep(0.005)
                continue
            self.received.append(arrived[1])
            if isinstance(self.received[-1], kinds):
                return self.received[-1]

    async def send(self, message):
        self.router.send(NAME, message)

    async def welcome(self, **changes):
        """Answer a generator that joins; return its first words, Join and Hello."""
        join = await self.receive(Join)
        tree = self.config.model_dump(mode="json")
        for section, values in changes.items():
            tree[section] |= values
        await self.send(Welcome(config=tree, model_dir="model", trainer_node=node_name()))
        return join, None if changes else await self.receive(Hello)

    def count(self, kind) -> int:
        return sum(isinstance(message, kind) for message in self.received)


def play(conversation, run_config: RunConfig):
    """Run the role against `conversation(orchestrator)`; return that and the role's error."""

    async def work():
        orchestrator = Conversation(run_config)
        with closing(orchestrator.router):
            role = asyncio.create_task(orchestrator.generator.run())
            async with asyncio.timeout(20):
                await conversation(orchestrator)
                (error,) = await asyncio.gather(role, return_exceptions=True)
        return orchestrator, error

    return asyncio.run(work())


def test_completions_are_bounded_and_answered_one_by_one_until_stop():
    async def conversation(it):
        join, hello = await it.welcome()
        assert (join.process, join.supervised) == ("process 1 on host-1", True)
        assert (hello.rank, hello.capacity, hello.node) == (2, 4, node_name())
        await it.send(generate(0))
        await it.send(generate(1))
        for _ in range(16):
            await it.receive(Sample)
        await it.send(Stop())

    it, error = play(conversation, config())
    assert error is None
    engine = the_engine()
    assert (engine.most, engine.index, engine.model_dir, engine.stopped) == (4, 3, "model", 1)
    assert [m.group for m in it.received if isinstance(m, Sample)] == [0] * 8 + [1] * 8


def test_what_another_generator_began_is_continued_under_its_own_index_and_budget():
    begun = Partial(int_bytes([7]), float_bytes([-1.0]), [VersionSpan(2, 0, 1)], (0, 0))

    async def conversation(it):
        await it.welcome()
        await it.send(
            Generate(group=4, prompt_id=9, prompt=[1], indices=[5, 2],
                     limits=[TurnLimits(11, 4), TurnLimits(12, 4)], temperature=1.0,
                     begun={2: begun})
        )  # fmt: skip
        samples = [await it.receive(Sample) for _ in range(2)]
        assert {(s.group, s.index, *ints(s.token_ids)) for s in samples} == {(4, 5, 11), (4, 2, 12)}
        await it.send(Stop())

    assert play(conversation, config())[1] is None
    assert the_engine().begun == [None, begun]


@pytest.mark.parametrize("mode", ["synchronous", "pipeline"])
def test_in_synchronous_mode_a_completions_noise_follows_from_its_place_in_the_run(mode):
    async def conversation(it):
        await it.welcome()
        for evaluation in (-1, 6):
            await it.send(generate(3, evaluation=evaluation))
            for _ in range(8):
                await it.receive(Sample)
        await it.send(Stop())

    run_config = config().model_copy(update={"schedule": Schedule(mode=mode)})
    assert play(conversation, run_config)[1] is None
    names = the_engine().names
    places = [f"{evaluation} 3 {index}" for evaluation in (-1, 6) for index in range(8)]
    assert names == (places if mode == "synchronous" else [""] * 16)


@pytest.mark.parametrize(("evaluation", "told"), [(-1, 8), (6, 0)])
def test_training_completions_tell_how_they_grow_and_evaluations_do_not(evaluation, told):
    async def conversation(it):
        await it.welcome()
        await it.send(generate(3, thinking=2000, evaluation=evaluation))
        for _ in range(min(told, 4)):
            grown = await it.receive(Grown)
            assert (grown.group, grown.start, grown.rest.token_ids) == (3, 0, int_bytes([5, 6]))
        await it.receive(GeneratorStats)
        await it.send(Stop())

    it, error = play(conversation, config())
    assert error is None
    assert it.count(Grown) == min(told, 4)  # of four at a time


def test_a_new_conversation_gives_up_all_work_and_keeps_the_engine():
    async def conversation(it):
        await it.welcome()
        await it.send(generate(0, thinking=2000))
        await it.send(ScoreRequest(step=1, prompts=[[1]], completions=[[2]]))
        await it.send(update(8))
        await it.receive(Grown)
        engine = the_engine()
        it.router.end(NAME)
        _, hello = await it.welcome()
        assert (hello.version, it.count(WeightsUpdated)) == (0, 0)
        assert (engine.running, engine.cut, engine.forgot, engine.stopped) == (0, 4, 1, 0)
        await it.send(update(5))
        assert (await it.receive(WeightsUpdated)).version == 5
        await it.send(generate(0))
        samples = [await it.receive(Sample) for _ in range(8)]
        assert {s.index for s in samples} == {*range(8)}
        await it.send(Stop())

    it, error = play(conversation, config())
    assert error is None
    assert (it.count(Join), it.count(Sample)) == (2, 8)
    assert the_engine().stopped == 1


def test_a_conversation_that_ends_before_the_welcome_begins_again():
    async def conversation(it):
        await it.receive(Join)
        it.router.end(NAME)
        await it.welcome()
        await it.send(Stop())

    it, error = play(conversation, config())
    assert (error, it.count(Join), it.count(Hello)) == (None, 2, 1)


def test_weights_of_a_trainer_that_is_gone_do_not_end_the_engine(capsys):
    async def conversation(it):
        await it.welcome()
        await it.send(update(TORN))
        await asyncio.sleep(0.1)
        it.router.close()

    _, error = play(conversation, config(rejoin_seconds=1.0))
    assert isinstance(error, OrchestratorGoneError)
    assert "loads no weights: weights version 3" in capsys.readouterr().err


def test_a_run_that_needs_another_engine_ends_the_process():
    async def conversation(it):
        await it.welcome()
        it.router.end(NAME)
        await it.welcome(timeouts={"batch_seconds": 7.0}, generation={"concurrent_completions": 5})

    it, error = play(conversation, config())
    assert isinstance(error, OtherEngineError)
    assert "the run has another generation now" in str(error)
    assert it.count(Failed) == 0
    assert the_engine().stopped == 1


def test_a_generator_that_is_asked_to_leave_ends_its_work_until_it_is_stopped():
    async def conversation(it):
        await it.welcome()
        await it.send(generate(0, thinking=900))
        assert it.generator.leave()
        await it.receive(Leaving)
        while it.count(Sample) < 8:
            await it.receive(Sample)
        await it.send(Stop())

    it, error = play(conversation, config())
    assert (error, it.count(Left), the_engine().cut) == (None, 0, 0)


def test_a_generator_leaves_with_what_is_begun_when_its_time_is_over():
    async def conversation(it):
        await it.welcome()
        await it.send(generate(0, thinking=2000))
        await it.receive(Grown)
        assert it.generator.leave()
        await it.receive(Left)

    it, error = play(conversation, config(shutdown_seconds=1.0))
    kinds = [type(message) for message in it.received]
    assert kinds.index(Grown) < kinds.index(Leaving) < kinds.index(Left)
    assert (error, it.count(Failed), the_engine().cut) == (None, 0, 4)


def test_a_generator_without_an_orchestrator_leaves_at_once():
    async def conversation(it):
        await it.welcome()
        it.router.close()
        await asyncio.sleep(0.3)
        assert it.generator.leave()

    started = time.monotonic()
    assert play(conversation, config(shutdown_seconds=60.0))[1] is None
    assert time.monotonic() - started < 10


def test_it_signs_while_it_waits_and_completes_and_not_while_its_engine_hangs(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(liveness.FOLDER, str(tmp_path / "node"))
    monkeypatch.setattr(liveness, "_INTERVAL", 0.0)
    monkeypatch.setattr(liveness, "_signer", None)
    monkeypatch.setattr(serve, "STATS_SECONDS", 0.05)
    liveness.begin(config(), "generator", 2)

    async def conversation(it):
        async def signs(beats=4):
            """Return the states and times of the signs over some beats of the role's loop."""
            states, times = set(), set()
            for _ in range(beats):
                await it.receive(GeneratorStats)
                (sign,) = liveness.signs(tmp_path / "node").values()
                states.add(sign.state)
                times.add(sign.time)
            return states, len(times)

        await it.welcome()
        states, times = await signs()
        assert (states, times > 1) == ({"waiting"}, True)
        await it.send(generate(0))
        for _ in range(8):
            await it.receive(Sample)
        await it.send(generate(1, thinking=2000, evaluation=1))  # completes in an hour
        await signs()
        assert await signs() == ({"generating"}, 1)
        it.router.end(NAME)  # the wait for the next orchestrator is no hang
        await it.receive(Join)
        before = last = next(iter(liveness.signs(tmp_path / "node").values()))
        while last.time == before.time or last.state != "waiting":
            await asyncio.sleep(0.05)
            last = next(iter(liveness.signs(tmp_path / "node").values()))
        await it.send(Stop())

    assert play(conversation, config())[1] is None


def test_stop_ends_the_role_while_requests_run_and_the_engine_dies():
    async def conversation(it):
        await it.welcome()
        await it.send(generate(0, thinking=1001))
        await it.receive(Grown)
        await it.send(Stop())

    it, error = play(conversation, config())
    assert error is None
    assert it.count(Failed) == 0
    assert the_engine().stopped == 1


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (update(TORN), f"{NAME} (rank 2): WeightsError: weights version 3 is not complete in"
                       " /dev/shm/node"),
        (generate(temperature=0.7), "temperature 0.7, but log-probs are computed for"),
        (SaveState(step=1, directory=""), "a generator does not answer SaveState"),
    ],
)  # fmt: skip
def test_any_error_is_reported_and_ends_the_role(message, text):
    async def conversation(it):
        await it.welcome()
        await it.send(generate(0, thinking=1000))
        await it.send(message)
        assert text in (await it.receive(Failed)).error

    _, error = play(conversation, config())
    assert isinstance(error, Exception)
    assert the_engine().stopped == 1


def test_an_engine_that_does_not_start_is_reported():
    FakeEngine.fails_to_start = True

    async def conversation(it):
        await it.receive(Join)
        tree = it.config.model_dump(mode="json")
        await it.send(Welcome(config=tree, model_dir="model", trainer_node=node_name()))
        assert "Engine core initialization failed" in (await it.receive(Failed)).error

    _, error = play(conversation, config())
    assert isinstance(error, RuntimeError)


def test_an_engine_that_hangs_is_reported_and_ends_the_role():
    async def conversation(it):
        await it.welcome()
        FakeEngine.hangs = True
        assert "did not answer within 0.3 s" in (await it.receive(Failed)).error

    _, error = play(conversation, config(silence_seconds=0.3))
    assert isinstance(error, RuntimeError)
    assert the_engine().stopped == 1


@pytest.mark.parametrize("welcomed", [True, False])
def test_an_orchestrator_that_is_gone_ends_the_role(welcomed):
    async def conversation(it):
        await it.welcome()
        if welcomed:
            it.router.close()
        else:
            it.router.end(NAME)  # and the next one is there, and does not answer
            await it.receive(Join)

    _, error = play(conversation, config(rejoin_seconds=0.4))
    assert isinstance(error, OrchestratorGoneError)
    assert "timeouts.rejoin_seconds" in str(error)
    assert the_engine().stopped == 1
