"""The verifier pool: completions in, verdicts out, from workers that may die at any time."""

import asyncio
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import msgspec

from megatron_rl.rewards.base import Outcome, Verdict, VerifierDown
from megatron_rl.rewards.verifier_settings import VerifierSettings
from megatron_rl.rewards.worker import Reply, Request, encode, receive, wall_limit

LIMIT_SIGNALS = {signal.SIGPROF: "CPU time", signal.SIGALRM: "time"}  # the worker's own timers
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
MAX_BUGS = 20  # unexpected exceptions in a row after which the verifier is down
GRACE_SECONDS = 5.0  # A worker that has not killed itself this long after its limit is killed
_decode = msgspec.msgpack.Decoder(Reply).decode


class WorkerLost(RuntimeError):
    """The connection to a worker broke; another worker can take the request."""


class WorkerProcess:
    """A fork server and its child in a process group of their own, and the socket to them.

    One thread at a time may use it; `kill` is safe from any other.
    """

    def __init__(self, settings: VerifierSettings, kinds: tuple[str, ...]) -> None:
        self.settings, self.kinds = settings, kinds
        self.spawn()

    def spawn(self) -> None:
        """Start a process, which is usable after `wait_ready`."""
        self._socket, theirs = socket.socketpair()
        self._stream = self._socket.makefile("rb")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONHASHSEED": "0",  # for a fixed order of sympy's terms, and with it fixed verdicts
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        fd, settings = theirs.fileno(), self.settings.model_dump_json()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.rewards.worker", str(fd), settings, *self.kinds],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )
        self.pid = self._process.pid  # process id of the fork server, which leads the process group
        theirs.close()

    def wait_ready(self) -> None:
        """Wait until it can verify; `VerifierDown` if it cannot, `WorkerLost` if it was killed."""
        self._socket.settimeout(self.settings.start_seconds)
        try:
            reply = _decode(receive(self._stream))
        except TimeoutError:
            raise VerifierDown(
                f"a verifier worker did not start within {self.settings.start_seconds:g} s"
                f" (verifier.start_seconds)\n{self._end()}"
            ) from None
        except (EOFError, OSError, msgspec.DecodeError) as e:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self._process.wait(timeout=2) < 0:
                    raise WorkerLost("a worker was killed while it started") from None
            raise VerifierDown(f"a verifier worker did not start: {e}\n{self._end()}") from None
        if reply.status == "down":
            raise VerifierDown(reply.reason)

    def ask(self, request: Request) -> Reply:
        """Return the worker's reply to a request; `WorkerLost` if none comes within its limits."""
        limit = wall_limit(self.settings, request[0]) + GRACE_SECONDS
        self._socket.settimeout(limit)
        try:
            self._socket.sendall(encode(request))
            return _decode(receive(self._stream))
        except TimeoutError:
            raise WorkerLost(f"a worker did not answer within {limit:g} s") from None
        except (EOFError, OSError, msgspec.DecodeError) as e:
            raise WorkerLost(f"the connection to a worker broke ({type(e).__name__})") from None
        except BaseException:
            self.kill()  # a reply may still come: this connection must not be used again
            raise

    def kill(self) -> None:
        """Kill fork server and child, and end a wait for their reply."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Kill the worker and close what belongs to it."""
        self.kill()
        for part in (self._stream, self._socket, self._errors):
            part.close()

    def forget(self) -> None:
        """Close this process's copy of the socket: after a fork the worker is the parent's."""
        if (fd := self._socket.detach()) >= 0:
            os.close(fd)
        self._process.returncode = 0  # not this process's child

    def _end(self) -> str:
        """Kill the worker and return the end of its standard error."""
        self.kill()
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:].strip()


class PoolStats(msgspec.Struct):
    """Counts since the start of the pool."""

    deaths: int = 0  # workers that died and were replaced; their completions were verified again
    bugs: int = 0  # outcomes `timed_out` because of an unexpected exception in a verifier


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
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, self.verify_blocking, kind, completion, gold, meta
            )

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
                with self._lock:
                    self.stats.bugs += 1
                    self._bugs_in_a_row += 1
                    if self._bugs_in_a_row >= MAX_BUGS:
                        raise VerifierDown(
                            f"the verifier failed on {MAX_BUGS} completions in a row; the last:"
                            f" {reply.reason}"
                        )
                return Verdict(Outcome.TIMED_OUT, f"error of the verifier: {reply.reason}")
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
