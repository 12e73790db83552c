"""The generator's role: serve a run's orchestrator, and the one that takes its place, until Stop.

    Join                              ->  <-  Welcome: the engine is started, if it does not run yet
    Hello                             ->  <-  UpdateWeights, Generate, ScoreRequest, Stop
    WeightsUpdated, Sample, Scores    ->

This is one conversation. Another one begins when the orchestrator is a new process, or has taken
this generator for lost: work is given up, while the engine keeps its weights and its cache.

`Generator.work` has one coroutine per message: they run concurrently, and completions are admitted
in the order of arrival, `generation.concurrent_completions` at a time. Any error ends the role: the
orchestrator gets `Failed`, and the process exits with the error.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from megatron_rl import liveness
from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.config.sections import Timeouts
from megatron_rl.generator import engine_errors
from megatron_rl.generator.conversations import Conversations, OrchestratorGoneError
from megatron_rl.generator.rollout_calls import RolloutCalls
from megatron_rl.generator.store_keeper import (
    CHECK_SECONDS,
    StoreKeeper,
    sees_trainer_stores,
    store_spec,
)
from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.store import node_name

STATS_SECONDS = 1.0
_WORK_SHARE = 0.8  # of `timeouts.shutdown_seconds`: completions of a leaving generator may end
_LEAVING_CHECK_SECONDS = 0.2


class OtherEngineError(RuntimeError):
    """The run has settings that this engine was not started with."""


class _Stopped(Exception):
    """The orchestrator sent Stop, or the generator has left."""


class Generator:
    """One engine in the service of a run.

    Args:
        endpoint: ZeroMQ address of the orchestrator, or the file that has it.
        name: of the generator, and of no other one of the run.
        index: the engine's number, by which its samples differ from those of others.
        rank: for messages, as `process`: `process 123 on host`.
        supervised: True if a rank of torchrun starts the process again when it ends.
        prepare: called with configuration and model directory before the engine is started.
        ready: called when the engine has started.
        show_life: called every second from then on, while the event loop works.
    """

    def __init__(
        self,
        endpoint: str | Path,
        name: str,
        index: int,
        rank: int,
        process: str = "",
        *,
        supervised: bool = False,
        prepare: Callable[[RunConfig, str], None] = lambda config, model_dir: None,
        ready: Callable[[], None] = lambda: None,
        show_life: Callable[[], None] = lambda: None,
    ) -> None:
        self._endpoint, self._name, self._index, self._rank = endpoint, name, index, rank
        self._join = m.Join(process=process, supervised=supervised)
        self._prepare, self._ready, self._show_life = prepare, ready, show_life
        self._node = node_name()
        self._timeouts, self._settings = Timeouts(), dict[str, Any]()
        self._keeper: StoreKeeper | None = None
        self._rollouts: RolloutCalls | None = None
        self._works = set[asyncio.Task[None]]()
        self._is_member = False  # from Hello to the end of the conversation
        self._serves = self._is_asked_to_leave = False
        self._running = self._tokens = 0
        self._busy_seconds, self._counted_at = 0.0, time.perf_counter()

    async def run(self) -> None:
        """Join, start the engine and serve until Stop; raises what ended the role."""
        self._run = Conversations(self._endpoint, self._name, self._join)
        engine, self._delivery_seconds = None, 0.0
        try:
            await self._first_welcome()
            from megatron_rl.generator.engine import Engine

            liveness.sign("starting")
            engine = self._engine = Engine(self._config, self._index, self._model_dir)
            await engine.prepare()
            self._rollouts = RolloutCalls(
                self._config, engine, self._count_running, self._send_answer
            )
            self._ready()
            await self._serve()
        except (OrchestratorGoneError, OtherEngineError):
            raise
        except _Stopped:  # before there was an engine
            pass
        except Exception as e:
            if cause := engine_errors.cause(engine.cores if engine else ()):
                e.add_note(cause)
            error = f"{self._name} (rank {self._rank}): {type(e).__name__}: {e}"
            self._run.send_failed(f"{error} {cause}".rstrip())
            self._delivery_seconds = self._timeouts.shutdown_seconds / 2
            raise
        finally:
            # What it has sent is there before the engine is stopped, which takes seconds.
            closing = asyncio.create_task(
                asyncio.to_thread(self._run.close, self._delivery_seconds)
            )
            await asyncio.sleep(0)
            if engine is not None:
                engine.stop()
            if self._rollouts is not None:
                await self._rollouts.close()
            await closing
            if self._keeper is not None:
                # Last: while others of the node live, they would take over.
                self._keeper.close()

    def leave(self) -> bool:
        """Take no more work, and end with that which is begun; called by a signal's handler.

        Returns False if it serves no orchestrator yet: it may end at once.
        """
        self._is_asked_to_leave = True
        return self._serves

    async def _first_welcome(self) -> None:
        limit = self._timeouts.startup_seconds
        self._run.begin()
        try:
            async with asyncio.timeout(limit):
                while not isinstance(message := await self._run.next(), m.Welcome):
                    if isinstance(message, m.Stop):
                        raise _Stopped
                    if message is None:
                        self._run.begin()
        except TimeoutError:
            self._run.check(0.0, "startup_seconds")
            raise
        self._welcome(message)
        self._prepare(self._config, self._model_dir)
        self._admission = asyncio.Semaphore(self._config.generation.concurrent_completions)

    def _welcome(self, welcome: m.Welcome) -> None:
        """Take the run's configuration; OtherEngineError: the engine was started with another."""
        self._run.welcome()
        config, model_dir = RunConfig.model_validate(welcome.config), welcome.model_dir
        settings = _engine_settings(config, model_dir)
        if self._settings and settings != self._settings:
            other = [key for key, value in settings.items() if value != self._settings[key]]
            raise OtherEngineError(
                f"the run has another {', '.join(other)} now than this engine was started with: a"
                " new process is needed"
            )
        self._config, self._model_dir, self._settings = config, model_dir, settings
        if self._rollouts is not None:
            self._rollouts.config = config
        self._timeouts = config.timeouts
        if self._keeper is None and not sees_trainer_stores(config, welcome.trainer_node):
            self._keeper = StoreKeeper(store_spec(config, self._node, self._endpoint))

    def _hello(self) -> None:
        capacity = self._config.generation.concurrent_completions
        self._run.send(
            m.Hello(
                role="generator", rank=self._rank, version=self._engine.version, node=self._node,
                capacity=capacity,
            )
        )  # fmt: skip
        self._is_member = True

    async def _serve(self) -> None:
        self._serves = True
        self._hello()
        try:
            async with asyncio.TaskGroup() as tasks:
                watches = self._send_stats, self._watch, self._watch_engine, self._leave_when_asked
                for watch in watches:
                    tasks.create_task(watch())
                while True:
                    message = await self._run.next()
                    if message is None:
                        await self._begin_again()
                    elif isinstance(message, m.Stop):
                        raise _Stopped
                    elif isinstance(message, m.Welcome):
                        self._welcome(message)
                        self._hello()
                    elif self._is_member:  # else it was meant for the one that it was before
                        for coroutine in self.work(message):
                            task = tasks.create_task(coroutine)
                            self._works.add(task)
                            task.add_done_callback(self._works.discard)
        except BaseExceptionGroup as group:
            # Errors of an engine that is being stopped do not count.
            if group.subgroup(_Stopped) is None:
                raise group.exceptions[0] from None

    async def _begin_again(self) -> None:
        """Give up what the old conversation asked for, and join again."""
        self._is_member = False
        await self._give_up_work()
        await self._engine.forget_stores()
        self._run.begin()

    async def _give_up_work(self) -> None:
        for task in self._works:
            task.cancel()
        if self._works:
            await asyncio.wait(self._works)

    def work(self, message: m.Message) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines that answer a message.

        Raises:
            TypeError: a message that a generator does not answer.
            ValueError: a temperature other than the run's.
        """
        match message:
            case m.Generate():
                expected = self._config.generation.temperature
                if message.evaluation < 0 and message.temperature != expected:
                    raise ValueError(
                        f"group {message.group} has temperature {message.temperature}, but"
                        f" log-probs are computed for generation.temperature = {expected}"
                    )
                pairs = zip(message.indices, message.limits, strict=True)
                return [self._generate(message, index, limits) for index, limits in pairs]
            case m.UpdateWeights():
                return [self._update(message)]
            case m.ScoreRequest():
                return [self._score(message)]
        raise TypeError(
            f"a generator does not answer {type(message).__name__}; orchestrator and generator"
            " are of different versions"
        )

    async def _generate(self, message: m.Generate, index: int, limits: m.TurnLimits) -> None:
        assert self._rollouts is not None
        async with self._admission:
            self._tokens += await self._rollouts.answer(message, index, limits)

    def _send_answer(self, message: m.Message) -> None:
        self._sign()
        self._run.send(message)

    async def _update(self, message: m.UpdateWeights) -> None:
        try:
            updated = await self._engine.update(message.manifest, message.folder)
        except WeightsError as e:
            if self._run.is_open:
                raise
            # The engine is as it was, and the trainer that had this version is gone.
            print(f"warning: {self._name} loads no weights: {e}", file=sys.stderr, flush=True)
            return
        self._sign()
        self._run.send(updated)

    async def _score(self, message: m.ScoreRequest) -> None:
        version, logprobs = await self._engine.score(message.prompts, message.completions)
        self._run.send(m.Scores(step=message.step, version=version, logprobs=logprobs))

    async def _send_stats(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(STATS_SECONDS)
            if any(core.exitcode for core in self._engine.cores):  # vLLM tells running requests
                raise RuntimeError("a process of the engine is gone")
            self._show_life()
            self._count_running(0)
            stats = m.GeneratorStats(
                seconds=self._counted_at - last,
                busy_seconds=self._busy_seconds,
                tokens=self._tokens,
                aborted=self._engine.aborted,
            )
            last, self._busy_seconds, self._tokens = self._counted_at, 0.0, 0
            if self._is_member:
                self._run.send(stats)

    def _count_running(self, change: int) -> None:
        now = time.perf_counter()
        if self._running:
            self._busy_seconds += now - self._counted_at
        self._running, self._counted_at = self._running + change, now
        # Once a second without a change: a hanging engine has requests, and ends none.
        if change or not self._running:
            self._sign()

    def _sign(self) -> None:
        liveness.sign("generating" if self._running else "waiting", self._engine.version)

    async def _watch(self) -> None:
        """Raise what is wrong with the orchestrator, or with the store of the node."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._run.check(self._timeouts.rejoin_seconds, "rejoin_seconds")
            if self._keeper is not None:
                self._keeper.check()

    async def _watch_engine(self) -> None:
        while True:
            seconds = self._timeouts.silence_seconds
            await asyncio.sleep(seconds / 3)
            await self._engine.check_alive(seconds)

    async def _leave_when_asked(self) -> None:
        while not self._is_asked_to_leave:  # a signal's handler wakes no task
            await asyncio.sleep(_LEAVING_CHECK_SECONDS)
        self._run.send(m.Leaving())
        deadline = time.monotonic() + self._timeouts.shutdown_seconds * _WORK_SHARE
        while self._run.is_open and time.monotonic() < deadline:
            await asyncio.sleep(_LEAVING_CHECK_SECONDS)
        await self._give_up_work()
        if self._run.is_open:
            self._run.send(m.Left())
            self._delivery_seconds = self._timeouts.shutdown_seconds * (1 - _WORK_SHARE)
        raise _Stopped


def _engine_settings(config: RunConfig, model_dir: str) -> dict[str, Any]:
    """Return what an engine is built from, by key."""
    return {
        "model": (config.model, model_dir),
        "seed": config.seed,
        "generation": config.generation,
        "precision": config.precision,
        "weights.dtype": config.weights.dtype,
        "weights.quantization": config.weights.quantization,
        "roles.generator_tensor_parallel": config.roles.generator_tensor_parallel,
        "algorithm.routing_replay": config.algorithm.routing_replay,
        "rollout": config.rollout,
        "task.rollout": [
            (name, t.rollout, t.tools, t.environment, t.environment_options)
            for name, t in config.tasks.items()
        ],
    }
