"""The verifier pool: completions in, verdicts out, from workers that may die at any time."""

import asyncio
import queue
import signal
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import msgspec

from megatron_rl.rewards.base import Outcome, Verdict, VerifierDown
from megatron_rl.rewards.process import WorkerLost, WorkerProcess
from megatron_rl.rewards.verifier_settings import VerifierSettings
from megatron_rl.rewards.worker import Request

LIMIT_SIGNALS = {signal.SIGPROF: "CPU time", signal.SIGALRM: "time"}  # the worker's own timers
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
MAX_BUGS = 20
"""Unexpected exceptions in a row after which the verifier is down."""


class PoolStats(msgspec.Struct):
    """Counts since the start of the pool."""

    verdicts: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    """(task kind, outcome) -> completions."""
    deaths: int = 0
    """Workers that died and were replaced; their completions were verified again."""
    bugs: int = 0
    """Outcomes `unparsable` because of an unexpected exception in a verifier."""


class VerifierPool:
    """Worker processes behind a bounded queue: `async with VerifierPool(...) as p: p.verify(...)`.

    A thread per worker waits for its replies. A worker that dies is replaced and its completion is
    verified again, so no verdict depends on it. When workers only die (`max_deaths` in a row) or
    cannot start, every pending and later call raises `VerifierDown`.

    The libraries of the task `kinds` are loaded at the start.
    """

    def __init__(self, settings: VerifierSettings, kinds: Iterable[str]) -> None:
        self.settings, self.kinds = settings, tuple(kinds)
        self.stats = PoolStats()
        self.workers: list[WorkerProcess] = []
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(settings.workers, "verifier")
        self._admission = asyncio.Semaphore(settings.workers + settings.queue_size)
        self._admitted = 0
        self._lock = threading.Lock()
        self._down: VerifierDown | None = None
        self._deaths_in_a_row = self._bugs_in_a_row = 0

    async def __aenter__(self) -> Self:
        try:
            await asyncio.to_thread(self.start)
        except asyncio.CancelledError:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def start(self) -> None:
        """Start the workers and wait until they can verify; `VerifierDown` if they cannot."""
        try:
            with self._lock:
                self._raise_if_down()
                for _ in range(self.settings.workers):
                    self.workers.append(WorkerProcess(self.settings, self.kinds))
            for worker in self.workers:
                try:
                    worker.wait_ready()
                except WorkerLost as e:
                    self._replace(worker, str(e))
                self._idle.put(worker)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the workers; pending calls raise `VerifierDown`."""
        self._stop(VerifierDown("the verifier pool was closed"))
        self._threads.shutdown()
        for worker in self.workers:
            worker.close()

    @property
    def waiting(self) -> int:
        """Completions in the queue."""
        return max(0, self._admitted - self.settings.workers)

    @property
    def full(self) -> bool:
        """True if the queue is full, so that `verify` would wait for admission."""
        return self._admission.locked()

    async def verify(
        self, kind: str, completion: str, gold: str, meta: dict[str, Any] | None = None
    ) -> Verdict:
        """Return the verdict on a completion, without blocking the event loop.

        Args:
            kind: task kind, one of the pool's.
            completion: decoded completion, thinking included.
            gold: right answer (math), JSON of the tests (code), entry (reasoning).
            meta: further input of the task's verifier.

        Raises `VerifierDown`, with the remedy, if the verifier cannot give a verdict.
        """
        async with self._admission:
            self._admitted += 1
            try:
                verdict = await asyncio.get_running_loop().run_in_executor(
                    self._threads, self.verify_blocking, kind, completion, gold, meta
                )
            finally:
                self._admitted -= 1
        self.stats.verdicts[kind, verdict.outcome.value] += 1
        return verdict

    def verify_blocking(
        self, kind: str, completion: str, gold: str, meta: dict[str, Any] | None = None
    ) -> Verdict:
        """Return the verdict on a completion; see `verify`. May be called from any thread."""
        if kind not in self.kinds:
            kinds = ", ".join(self.kinds)
            raise VerifierDown(f"the pool was started for {kinds}, not for {kind!r}")
        worker = self._idle.get()
        try:
            return self._verify_on(worker, (kind, completion, gold, meta or {}))
        except VerifierDown as e:
            self._stop(e)
            raise
        finally:
            self._idle.put(worker)

    def _raise_if_down(self) -> None:
        if self._down is not None:
            raise self._down

    def _stop(self, error: VerifierDown) -> None:
        with self._lock:
            self._down = self._down or error
            for worker in self.workers:
                worker.kill()

    def _verify_on(self, worker: WorkerProcess, request: Request) -> Verdict:
        """Return the verdict, replacing the worker as often as it dies."""
        crashes = 0
        while True:
            self._raise_if_down()
            try:
                reply = worker.ask(request)
            except WorkerLost as e:
                self._replace(worker, str(e))
                continue
            if reply.status == "down":
                raise VerifierDown(reply.reason)
            if reply.verdict is not None:
                self._deaths_in_a_row = self._bugs_in_a_row = 0
                return reply.verdict
            if reply.status == "bug":
                self._count_bug(reply.reason)
                return Verdict(Outcome.UNPARSABLE, f"error of the verifier: {reply.reason}")
            by = signal.Signals(reply.signal)
            if limit := LIMIT_SIGNALS.get(by):
                self._deaths_in_a_row = 0
                return Verdict(Outcome.TIMED_OUT, f"over the {limit} limit of a verdict")
            self._count_death(f"a worker was killed by {by.name}")
            crashes += by in CRASHES
            if crashes > 1:
                return Verdict(Outcome.TIMED_OUT, f"the verifier crashed on it twice ({by.name})")

    def _replace(self, worker: WorkerProcess, reason: str) -> None:
        """Restart a worker, as often as deaths in a row are allowed."""
        while True:
            self._count_death(reason)
            worker.close()
            with self._lock:
                self._raise_if_down()
                worker.spawn()
            try:
                return worker.wait_ready()
            except WorkerLost as e:
                reason = str(e)

    def _count_death(self, reason: str) -> None:
        with self._lock:
            self._raise_if_down()
            self.stats.deaths += 1
            self._deaths_in_a_row += 1
            if self._deaths_in_a_row >= self.settings.max_deaths:
                raise VerifierDown(
                    f"{self._deaths_in_a_row} verifier workers died in a row without a verdict"
                    f" between them; the last: {reason}; look for the out-of-memory killer, or"
                    " raise verifier.memory_mib and verifier.max_deaths"
                )

    def _count_bug(self, reason: str) -> None:
        with self._lock:
            self.stats.bugs += 1
            self._bugs_in_a_row += 1
            if self._bugs_in_a_row >= MAX_BUGS:
                raise VerifierDown(
                    f"the verifier failed on {MAX_BUGS} completions in a row; the last: {reason}"
                )
