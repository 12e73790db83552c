"""The generator's role: serve one orchestrator over ZeroMQ until it sends Stop.

    orchestrator (ROUTER, bound)  <->  generator-<engine index> (DEALER, connected)

`Generator.work` has one coroutine per message: they run concurrently, and completions are admitted
in the order of arrival, `generation.concurrent_completions` at a time. Any error ends the role: the
orchestrator gets `Failed`, and the process exits with the error.
"""

import asyncio
import signal
import time
from collections.abc import Coroutine
from typing import Any

from megatron_rl import liveness
from megatron_rl import messages as m
from megatron_rl.compat import upstream, vllm_fixes
from megatron_rl.config import RunConfig
from megatron_rl.generator import engine_errors
from megatron_rl.generator.process_environment import prepare_environment
from megatron_rl.generator.store_keeper import CHECK_SECONDS, StoreKeeper
from megatron_rl.orchestrator_connection import OrchestratorConnection
from megatron_rl.weights.store_process import StoreSpec

STATS_SECONDS = 1.0


def run_generator(
    config: RunConfig,
    engine_index: int,
    rank: int,
    endpoint: str,
    model_dir: str,
    node: str = "",
    store: StoreSpec | None = None,
) -> None:
    """Run one generator until the orchestrator sends Stop; the engine's processes are gone then.

    Call it from the main thread: vLLM's processes end with the thread that started them.

    Engines are numbered from 0; `rank` is for messages. The orchestrator binds `endpoint`
    (`tcp://host:port`), and `model_dir` is the Hugging Face directory of weights version 0.
    `store` is that of this `node`, if it has one: the generator keeps it running (`store_keeper`).

    Raises:
        UnsupportedVersionError: a release of vLLM that may have faults.
        Exception: the error that ended the role, after it was reported as `Failed`.
    """
    upstream.check(vllm_fixes.FIXES)
    # Ctrl-C and torchrun's SIGTERM reach every rank: a generator ends by Stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    prepare_environment(config, model_dir)
    asyncio.run(Generator(config, engine_index, rank, endpoint, node, store).run(model_dir))


class OrchestratorGoneError(ConnectionError):
    """The connection to the orchestrator was lost for too long."""


class _Stopped(Exception):
    """The orchestrator sent Stop."""


class Generator:
    """One engine in the service of one orchestrator; the arguments are those of `run_generator`."""

    def __init__(
        self,
        config: RunConfig,
        engine_index: int,
        rank: int,
        endpoint: str,
        node: str = "",
        store: StoreSpec | None = None,
    ) -> None:
        self._config, self._node, self._store = config, node, store
        self._index, self._rank, self._endpoint = engine_index, rank, endpoint
        self._admission = asyncio.Semaphore(config.generation.concurrent_completions)
        self._running = self._tokens = 0
        self._busy_seconds, self._counted_at = 0.0, time.perf_counter()

    async def run(self, model_dir: str) -> None:
        """Start the engine with these weights and serve until Stop; raises what ended the role."""
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[bytes]()

        def deliver(data: bytes) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, data)

        self._peer = OrchestratorConnection(self._endpoint, f"generator-{self._index}", deliver)
        delivery_seconds = 0.0
        engine = keeper = None
        try:
            if self._store is not None:
                keeper = StoreKeeper(self._store)
            from megatron_rl.generator.engine import Engine

            liveness.sign("starting")
            engine = self._engine = Engine(self._config, self._index, model_dir)
            await engine.prepare()
            await self._serve(inbox, keeper)
        except OrchestratorGoneError:
            raise
        except Exception as e:
            if cause := engine_errors.cause(engine.cores if engine else ()):
                e.add_note(cause)
            error = f"generator {self._index} (rank {self._rank}): {type(e).__name__}: {e}"
            self._peer.send(m.Failed(error=f"{error} {cause}".rstrip()))
            delivery_seconds = self._config.timeouts.shutdown_seconds / 2
            raise
        finally:
            if engine is not None:
                engine.stop()
            if keeper is not None:  # last: while others of the node live, they would take over
                keeper.close()
            await asyncio.to_thread(self._peer.close, delivery_seconds)

    async def _serve(self, inbox: asyncio.Queue[bytes], keeper: StoreKeeper | None) -> None:
        version, capacity = self._engine.version, self._config.generation.concurrent_completions
        hello = m.Hello(
            role="generator", rank=self._rank, version=version, node=self._node, capacity=capacity
        )
        self._peer.send(hello)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_stats())
                tasks.create_task(self._watch_orchestrator())
                if keeper is not None:
                    tasks.create_task(self._watch_store(keeper))
                while True:
                    message = m.decode(await inbox.get())
                    if isinstance(message, m.Stop):
                        raise _Stopped
                    for coroutine in self.work(message):
                        tasks.create_task(coroutine)
        except BaseExceptionGroup as group:
            # Errors of an engine that is being stopped do not count.
            if group.subgroup(_Stopped) is None:
                raise group.exceptions[0] from None

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
                return [self._generate(message, i) for i in range(len(message.thinking_budgets))]
            case m.UpdateWeights():
                return [self._update(message)]
            case m.ScoreRequest():
                return [self._score(message)]
        raise TypeError(
            f"a generator does not answer {type(message).__name__}; orchestrator and generator"
            " are of different versions"
        )

    async def _generate(self, message: m.Generate, index: int) -> None:
        async with self._admission:
            self._count_running(+1)
            try:
                thinking, answer = message.thinking_budgets[index], message.answer_budget
                completion = await self._engine.complete(
                    message.prompt, thinking, answer, message.temperature
                )
            finally:
                self._count_running(-1)
        self._tokens += len(completion.token_ids)
        routes = b""
        if self._engine.routes is not None and completion.routes_NLK is not None:
            tokens = len(message.prompt) + len(completion.token_ids)
            routes = self._engine.routes.encoded(completion.routes_NLK, tokens)
        sample = m.Sample(
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
        self._peer.send(sample)

    async def _update(self, message: m.UpdateWeights) -> None:
        updated = await self._engine.update(message.manifest, message.folder)
        self._sign()
        self._peer.send(updated)

    async def _score(self, message: m.ScoreRequest) -> None:
        version, logprobs = await self._engine.score(message.prompts, message.completions)
        self._peer.send(m.Scores(step=message.step, version=version, logprobs=logprobs))

    async def _send_stats(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(STATS_SECONDS)
            if any(core.exitcode for core in self._engine.cores):  # vLLM tells running requests
                raise RuntimeError("a process of the engine is gone")
            self._count_running(0)
            stats = m.GeneratorStats(
                seconds=self._counted_at - last,
                busy_seconds=self._busy_seconds,
                tokens=self._tokens,
                aborted=self._engine.aborted,
            )
            last, self._busy_seconds, self._tokens = self._counted_at, 0.0, 0
            self._peer.send(stats)

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

    async def _watch_orchestrator(self) -> None:
        limit = self._config.timeouts.shutdown_seconds
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            if self._peer.error is not None:
                raise OrchestratorGoneError(f"the connection ended: {self._peer.error}")
            since = self._peer.disconnected_since
            if since is not None and time.monotonic() - since > limit:
                raise OrchestratorGoneError(
                    f"no orchestrator at {self._endpoint} for {limit:g} s"
                    " (timeouts.shutdown_seconds): it ended without sending Stop; its own log has"
                    " the cause"
                )

    async def _watch_store(self, keeper: StoreKeeper) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            keeper.check()
