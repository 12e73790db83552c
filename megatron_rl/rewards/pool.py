"""The verifier pool: completions in, verdicts out, from workers that may die at any time."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from megatron_rl.rewards.base import Outcome, Verdict, VerifierDown
from megatron_rl.rewards.protocol import Request, Response
from megatron_rl.rewards.slot import Lost, Slot
from megatron_rl.rewards.verifier_settings import VerifierSettings

OWN_LIMITS = {signal.SIGPROF: "CPU time", signal.SIGALRM: "time"}
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
MAX_BUGS = 20
"""Exceptions in a row that no verifier foresaw, after which it is down."""


@dataclass(slots=True)
class _Item:
    request: Request
    done: asyncio.Future[Verdict]
    crashes: int = 0


@dataclass(slots=True)
class PoolStats:
    """Counts since the start."""

    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(task kind, outcome) -> completions."""
    deaths: int = 0
    """Workers that died and were replaced, their completions judged again."""
    bugs: int = 0
    """Verdicts `unparsable` because of an exception that the verifier did not foresee."""
    seconds: float = 0.0
    """Time that workers spent on verdicts."""


class VerifierPool:
    """Workers behind a bounded queue: `async with VerifierPool(s) as p: await p.verify(...)`.

    A worker that dies is replaced and its completion is judged again, so no verdict depends on it.
    When workers only die (`max_deaths` in a row), or cannot start, every waiting and later call
    raises `VerifierDown`.

    Args:
        settings: limits and sizes.
        kinds: task kinds that will be asked for; their libraries are loaded at the start.
    """

    def __init__(
        self, settings: VerifierSettings, kinds: Iterable[str] = ("exact", "math")
    ) -> None:
        self.settings, self.kinds = settings, tuple(kinds)
        self.stats = PoolStats()
        self._slots: list[Slot] = []
        self._queue: asyncio.Queue[_Item] = asyncio.Queue(settings.queue_size)
        self._pending: set[asyncio.Future[Verdict]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._down: VerifierDown | None = None
        self._deaths_in_a_row = self._bugs_in_a_row = self._next_id = 0

    async def __aenter__(self) -> Self:
        self._slots = [Slot(self.settings, self.kinds) for _ in range(self.settings.workers)]
        try:
            # Starting is bounded by start_seconds; what a worker lacks is known before the run is.
            await asyncio.gather(*(self._first(slot) for slot in self._slots))
        except (VerifierDown, asyncio.CancelledError):
            self._kill()
            raise
        self._tasks = [asyncio.create_task(self._serve(slot)) for slot in self._slots]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._kill()
        self._stop(VerifierDown("the verifier pool was closed"))
        await asyncio.sleep(0)  # closed transports say goodbye in the loop

    @property
    def waiting(self) -> int:
        """Completions that wait for a worker."""
        return self._queue.qsize()

    @property
    def full(self) -> bool:
        """Whether `verify` would wait for a place in the queue: generators get no more work."""
        return self._queue.full()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of all workers."""
        return [pid for s in self._slots for pid in (s.process.pid, *s.process.child_pids)]

    async def verify(
        self, kind: str, completion: str, gold: str, meta: dict[str, Any] | None = None
    ) -> Verdict:
        """The verdict on a completion.

        Args:
            kind: task kind, one of the pool's.
            completion: decoded completion, thinking included.
            gold: right answer (maths), JSON of the tests (code), entry (reasoning).
            meta: what the task's verifier wants beside it.

        Raises:
            VerifierDown: no verdict is to be had; the message says why and what to do.
        """
        if kind not in self.kinds:
            kinds = ", ".join(self.kinds)
            raise VerifierDown(f"the pool was started for {kinds}, not for {kind!r}")
        self._raise_if_down()
        self._next_id += 1
        request = Request(
            id=self._next_id, kind=kind, completion=completion, gold=gold, meta=meta or {}
        )
        item = _Item(request, asyncio.get_running_loop().create_future())
        self._pending.add(item.done)
        try:
            # Both waits end: workers answer within their limits or the pool goes down.
            put = asyncio.create_task(self._queue.put(item))
            done, _ = await asyncio.wait((put, item.done), return_when=asyncio.FIRST_COMPLETED)
            if put not in done:
                put.cancel()
            verdict = await item.done
        finally:
            self._pending.discard(item.done)
        self.stats.verdicts[kind, verdict.verdict.value] += 1
        return verdict

    def _raise_if_down(self) -> None:
        if self._down is not None:
            raise self._down

    def _stop(self, error: VerifierDown) -> None:
        self._down = self._down or error
        for future in self._pending:
            if not future.done():
                future.set_exception(self._down)

    def _kill(self) -> None:
        for slot in self._slots:
            slot.close()

    async def _serve(self, slot: Slot) -> None:
        try:
            while self._down is None:
                item = await self._queue.get()
                if item.done.done():
                    continue
                started = time.monotonic()
                verdict = await self._judge(slot, item)
                self.stats.seconds += time.monotonic() - started
                if not item.done.done():
                    item.done.set_result(verdict)
        except VerifierDown as e:
            self._stop(e)

    async def _judge(self, slot: Slot, item: _Item) -> Verdict:
        """The verdict, on as many workers as it takes.

        Raises:
            VerifierDown: the verifier says so, or too many workers died in a row.
        """
        while True:
            try:
                response = await slot.ask(item.request)
            except Lost as e:
                await self._replace(slot, str(e))
                continue
            if response.status == "down":
                raise VerifierDown(response.reason)
            if response.verdict is not None:
                self._deaths_in_a_row = self._bugs_in_a_row = 0
                return response.verdict
            if response.status == "bug":
                return self._bug(response)
            by = signal.Signals(response.signal)
            if by in OWN_LIMITS:
                self._deaths_in_a_row = 0
                return Verdict(Outcome.TIMED_OUT, f"over the {OWN_LIMITS[by]} limit of a verdict")
            self._died(f"a worker was killed by {by.name}")
            if by in CRASHES:
                item.crashes += 1
                if item.crashes > 1:
                    reason = f"the verifier crashed on it twice ({by.name})"
                    return Verdict(Outcome.TIMED_OUT, reason)

    async def _replace(self, slot: Slot, reason: str) -> None:
        """A new worker for the slot, in as many tries as deaths in a row are allowed."""
        while True:
            self._died(reason)
            try:
                await slot.restart()
            except Lost as e:
                reason = str(e)
            else:
                return

    async def _first(self, slot: Slot) -> None:
        try:
            await slot.ready()
        except Lost as e:
            await self._replace(slot, str(e))

    def _died(self, reason: str) -> None:
        self.stats.deaths += 1
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row >= self.settings.max_deaths:
            raise VerifierDown(
                f"{self._deaths_in_a_row} verifier workers died in a row without a verdict between"
                f" them; the last: {reason}; look for the out-of-memory killer, or raise"
                " verifier.memory_mib and verifier.max_deaths"
            )

    def _bug(self, response: Response) -> Verdict:
        self.stats.bugs += 1
        self._bugs_in_a_row += 1
        if self._bugs_in_a_row >= MAX_BUGS:
            raise VerifierDown(
                f"the verifier failed on {MAX_BUGS} completions in a row; the last:"
                f" {response.reason}"
            )
        return Verdict(Outcome.UNPARSABLE, f"error of the verifier: {response.reason}")
