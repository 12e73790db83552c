"""The generator's role: serves one orchestrator over ZeroMQ until it says Stop.

    orchestrator (ROUTER, bound)  <->  generator-<engine index> (DEALER, connected)

Generate, UpdateWeights and ScoreRequest are worked on side by side; completions are admitted in
the order of arrival, `generation.concurrent_completions` at a time. Any error ends the role: the
orchestrator gets `Failed`, and the process exits with the error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from megatron_rl.compat import upstream, vllm_fixes
from megatron_rl.config import RunConfig
from megatron_rl.generator.process_environment import ignore_signals, prepare_environment
from megatron_rl.messages import (
    Failed,
    Generate,
    GeneratorStats,
    Hello,
    Message,
    Sample,
    ScoreRequest,
    Scores,
    Stop,
    UpdateWeights,
    WeightsUpdated,
    decode,
    encode,
)
from megatron_rl.weights.rendezvous import NOWHERE, Rendezvous

STATS_SECONDS = 1.0
_HEARTBEAT_MS = 5_000


def run_generator(
    config: RunConfig,
    engine_index: int,
    rank: int,
    endpoint: str,
    model_dir: str,
    version: int = 0,
    rendezvous: Rendezvous = NOWHERE,
) -> None:
    """Run one generator until the orchestrator says Stop; the engine's processes are gone then.

    To be called from the main thread (vLLM's processes end with the thread that started them).

    Args:
        config: the run's configuration.
        engine_index: number of this engine, from 0.
        rank: rank under torchrun, for messages.
        endpoint: address that the orchestrator binds, `tcp://host:port`.
        model_dir: Hugging Face directory of the weights `version`.
        version: optimizer steps that made these weights.
        rendezvous: the run's store; the transport `disk` needs none.

    Raises:
        Exception: whatever ended the role, after it was reported as `Failed`.
    """
    upstream.check(vllm_fixes.FIXES)
    ignore_signals()
    prepare_environment(config, model_dir)
    role = _Generator(config, engine_index, rank, endpoint, rendezvous)
    asyncio.run(role.run(model_dir, version))


class OrchestratorGoneError(ConnectionError):
    """Nobody is there to serve any more."""


class _Stopped(Exception):
    """The orchestrator said Stop."""


class _Generator:
    def __init__(
        self,
        config: RunConfig,
        engine_index: int,
        rank: int,
        endpoint: str,
        rendezvous: Rendezvous = NOWHERE,
    ) -> None:
        self._config, self._rendezvous = config, rendezvous
        self._index = engine_index
        self._rank = rank
        self._endpoint = endpoint
        self._slots = asyncio.Semaphore(config.generation.concurrent_completions)
        self._running = 0
        self._tokens = 0
        self._busy = _Stopwatch()
        self._lost_since: float | None = time.monotonic()
        self._stopping = False

    async def run(self, model_dir: str, version: int) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            self._socket = socket
            monitor = self._connect(socket)
            engine = None
            try:
                from megatron_rl.generator.engine import Engine

                engine = self._engine = Engine(
                    self._config, self._index, model_dir, version, self._rendezvous
                )
                await engine.prepare()
                await self._serve(monitor)
            except OrchestratorGoneError:
                socket.setsockopt(zmq.LINGER, 0)
                raise
            except Exception as e:
                await self._report(e)
                raise
            finally:
                if engine is not None:
                    engine.stop()
                socket.disable_monitor()
                monitor.close()

    def _connect(self, socket: Any) -> Any:
        socket.setsockopt(zmq.IDENTITY, f"generator-{self._index}".encode())
        socket.setsockopt(zmq.LINGER, int(1000 * self._config.timeouts.shutdown_seconds / 2))
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        # A host that vanished closes no connection; heartbeats find out.
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6 * _HEARTBEAT_MS)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(self._endpoint)
        return monitor

    async def _serve(self, monitor: Any) -> None:
        await self._send(
            Hello(
                role="generator",
                rank=self._rank,
                version=self._engine.version,
                capacity=self._config.generation.concurrent_completions,
            )
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_stats())
                tasks.create_task(self._follow_connection(monitor))
                tasks.create_task(self._watch_orchestrator())
                while True:
                    message = decode(await self._socket.recv())
                    if isinstance(message, Stop):
                        self._stopping = True
                        raise _Stopped
                    for work in self._work(message):
                        tasks.create_task(work)
        except BaseExceptionGroup as group:
            # What the engine says while it is being stopped is no error.
            if not self._stopping:
                raise _first(group) from None

    def _work(self, message: Message) -> list[Coroutine[Any, Any, None]]:
        match message:
            case Generate():
                self._check_temperature(message)
                return [self._generate(message, i) for i in range(len(message.thinking_budgets))]
            case UpdateWeights():
                return [self._update(message)]
            case ScoreRequest():
                return [self._score(message)]
        raise TypeError(
            f"a generator does not answer {type(message).__name__}; orchestrator and generator"
            " are of different versions"
        )

    def _check_temperature(self, message: Generate) -> None:
        expected = self._config.generation.temperature
        if message.evaluation < 0 and message.temperature != expected:
            raise ValueError(
                f"group {message.group} asks for temperature {message.temperature}, but log-probs"
                f" are computed for generation.temperature = {expected}"
            )

    async def _generate(self, message: Generate, index: int) -> None:
        async with self._slots:
            self._count_running(+1)
            try:
                completion = await self._engine.complete(
                    message.prompt,
                    message.thinking_budgets[index],
                    message.answer_budget,
                    message.temperature,
                )
            finally:
                self._count_running(-1)
        self._tokens += len(completion.token_ids)
        routes = b""
        if self._engine.routes is not None and completion.routes_NLK is not None:
            tokens = len(message.prompt) + len(completion.token_ids)
            routes = self._engine.routes.encoded(completion.routes_NLK, tokens)
        await self._send(
            Sample(
                group=message.group,
                index=index,
                prompt_id=message.prompt_id,
                evaluation=message.evaluation,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                forced=completion.forced,
                spans=completion.spans,
                finish_reason=completion.finish_reason,
                routes=routes,
            )
        )

    async def _update(self, message: UpdateWeights) -> None:
        times = await self._engine.update(message.manifest)
        await self._send(
            WeightsUpdated(
                version=message.manifest.version,
                pause_seconds=times.pause_seconds,
                transfer_seconds=times.transfer_seconds,
                requests_in_flight=times.requests_in_flight,
            )
        )

    async def _score(self, message: ScoreRequest) -> None:
        version, logprobs = await self._engine.score(message.prompts, message.completions)
        await self._send(Scores(step=message.step, version=version, logprobs=logprobs))

    async def _send_stats(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(STATS_SECONDS)
            now = time.perf_counter()
            stats = GeneratorStats(
                seconds=now - last,
                busy_seconds=self._busy.take(),
                running=self._running,
                tokens=self._tokens,
                aborted=self._engine.aborted,
            )
            last, self._tokens = now, 0
            await self._send(stats)

    def _count_running(self, change: int) -> None:
        self._running += change
        self._busy.run(self._running > 0)

    async def _follow_connection(self, monitor: Any) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._lost_since = None if connected else time.monotonic()

    async def _watch_orchestrator(self) -> None:
        limit = self._config.timeouts.shutdown_seconds
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            if self._lost_since is not None and time.monotonic() - self._lost_since > limit:
                raise OrchestratorGoneError(
                    f"no orchestrator at {self._endpoint} for {limit:g} s"
                    " (timeouts.shutdown_seconds): it ended without saying Stop; its own log has"
                    " the cause"
                )

    async def _send(self, message: Message) -> None:
        await self._socket.send(encode(message))

    async def _report(self, error: Exception) -> None:
        where = f"generator {self._index} (rank {self._rank})"
        await self._send(Failed(error=f"{where}: {type(error).__name__}: {error}"))


class _Stopwatch:
    """Seconds in which it ran, since they were last taken."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def run(self, running: bool) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self._seconds += now - self._since
        self._since = now if running else None

    def take(self) -> float:
        self.run(self._since is not None)
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
