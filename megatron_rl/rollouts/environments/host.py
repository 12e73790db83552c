"""Environments in worker processes, from the generator's event loop."""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import msgspec

from megatron_rl.config.rollout_settings import RolloutSettings
from megatron_rl.rollouts.environments.protocol import (
    CallResult,
    Opening,
    Request,
    Start,
    Step,
    frame,
    receive,
)
from megatron_rl.rollouts.rollout import RolloutError

START_SECONDS = 300.0  # for the import of the environment, which may load data
GRACE_SECONDS = 5.0  # from the time of a call to the end of a worker that has not answered
END_SECONDS = 5.0  # for a worker to close its episodes, before it is killed
CHARACTERS_PER_TOKEN = 16  # of a message, at most, by `rollout.tool_result_tokens`
_log = logging.getLogger(__name__)


class Worker:
    """A worker process, and the socket to it."""

    def __init__(
        self,
        start: Start,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._start, self._process, self._writer = start, process, writer
        self._waiting: dict[int, asyncio.Future[CallResult]] = {}
        self._killed = False
        self._reading = asyncio.create_task(self._read(reader))
        self.episodes: set[int] = set()  # not left yet
        self.usable = True  # False: it is dead, or has a call that does not end

    @classmethod
    async def start(cls, start: Start) -> Self:
        """Start a process and wait until the environment is imported; RolloutError: it is not."""
        ours, theirs = socket.socketpair()
        paths = filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")])
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *["-m", "megatron_rl.rollouts.environments.episodes"],
                    *[str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                    start_new_session=True,
                )
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()  # which ends the process
            raise
        worker = cls(start, process, reader, writer)
        try:
            reply = await worker._ask(0, frame(start), START_SECONDS, "the start of its worker")
            if reply.cause:
                raise RolloutError(reply.cause, f"{worker._name} cannot be loaded: {reply.text}")
        except BaseException:
            worker.kill()
            await worker.end()
            raise
        return worker

    async def call(self, request: Request) -> CallResult:
        """Return the reply to a request of an episode; RolloutError: it or its process failed."""
        limit = self._start.seconds + GRACE_SECONDS
        reply = await self._ask(request.episode, frame(request), limit, request.call)
        if reply.cause:
            raise RolloutError(reply.cause, f"{self._name}: {reply.text}")
        return reply

    def leave(self, episode: int) -> None:
        """Let the episode be closed, without waiting for it."""
        self.episodes.discard(episode)
        if not self._writer.is_closing():
            self._writer.write(frame(Request(episode, "close")))
        self._retire()

    def kill(self, *, by_a_call: bool = True) -> None:
        """Kill the process, and those of its group; its episodes fail.

        Those with a call in it may have caused that (`by_a_call`); the others have not.
        """
        self.usable, was_killed = False, self._killed
        if not was_killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._died(innocent=was_killed or not by_a_call))

    async def end(self) -> None:
        """Let the process close its episodes and end; kill it if it does not."""
        if not self._writer.is_closing():
            self._writer.write_eof()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        self.kill()
        await asyncio.wait_for(self._process.wait(), END_SECONDS)
        await asyncio.wait({self._reading}, timeout=END_SECONDS)

    @property
    def alive(self) -> bool:
        """True if its process has not ended."""
        return self._process.returncode is None

    @property
    def _name(self) -> str:
        return f"the environment {self._start.path}"

    async def _ask(self, episode: int, message: bytes, seconds: float, what: str) -> CallResult:
        if self._killed or self._writer.is_closing():
            raise self._died(innocent=True)
        self._waiting[episode] = future = asyncio.get_running_loop().create_future()
        self._writer.write(message)  # no drain: a worker that hangs must not hold up this loop
        try:
            return await asyncio.wait_for(future, seconds)
        except TimeoutError:
            del self._waiting[episode]
            self.kill(by_a_call=False)  # of the others
            text = f"{self._name}: {what} took longer than {seconds:g} s; its process was killed"
            raise RolloutError("timed out", text) from None
        finally:
            self._waiting.pop(episode, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decode = msgspec.msgpack.Decoder(CallResult).decode
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                reply = decode(await receive(reader))
                if reply.stuck:
                    self.usable = False
                if (future := self._waiting.get(reply.episode)) and not future.done():
                    future.set_result(reply)
                elif reply.cause:
                    _log.warning("%s: %s", self._name, reply.text)
                self._retire()
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
            pass  # it died; those that wait hear of it below
        finally:
            watching.cancel()
            self._writer.close()
            self.kill()

    async def _watch(self) -> None:
        """Close the socket when the process dies, for its children may hold the other end."""
        await self._process.wait()
        self._writer.transport.abort()

    def _retire(self) -> None:
        if not self.usable and not self.episodes:
            self.kill()

    def _died(self, *, innocent: bool) -> RolloutError:
        text = f"{self._name}: the process of the episode died"
        return RolloutError("died", text, innocent=innocent)


class Episode:
    """One episode of an environment."""

    def __init__(self, worker: Worker, number: int, row: dict[str, Any]) -> None:
        self._worker, self._number, self._row = worker, number, row

    async def reset(self) -> Opening:
        """Begin the episode; raises as `Worker.call`.

        Raises:
            RolloutError: the environment failed.
        """
        reply = await self._worker.call(Request(self._number, "reset", self._row))
        assert reply.opening is not None
        return reply.opening

    async def step(self, message: dict[str, Any]) -> Step:
        """Return the answer to a message of the policy; raises as `Worker.call`.

        Raises:
            RolloutError: the environment failed.
        """
        reply = await self._worker.call(Request(self._number, "step", message))
        assert reply.step is not None
        return reply.step


class EnvironmentHost:
    """The worker processes of an environment: `async with EnvironmentHost(...) as host: ...`.

    `path` is `package.module:Class`, with `options` as arguments, or `verifiers:NAME` for one of
    that package, with its configuration.
    """

    def __init__(self, path: str, options: dict[str, Any], settings: RolloutSettings) -> None:
        characters = CHARACTERS_PER_TOKEN * settings.tool_result_tokens
        self._start = Start(path, options, settings.environment_seconds, characters)
        self._number_of_workers = settings.workers
        self._workers: list[Worker] = []
        self._ended: list[Worker] = []
        self._numbers = itertools.count(1)
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        try:
            async with self._lock:
                await self._fill()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    @asynccontextmanager
    async def episode(self, row: dict[str, Any]) -> AsyncIterator[Episode]:
        """Give an episode of a row; leaving closes it. RolloutError: no worker could be started."""
        async with self._lock:  # one replacement at a time
            await self._fill()
            worker = min(self._workers, key=lambda w: len(w.episodes))
            number = next(self._numbers)
            worker.episodes.add(number)
        try:
            yield Episode(worker, number, row)
        finally:
            worker.leave(number)

    async def _fill(self) -> None:
        """Replace workers that are not usable."""
        unusable = [w for w in self._workers if not w.usable]
        self._ended = [w for w in [*self._ended, *unusable] if w.alive]
        self._workers = [w for w in self._workers if w.usable]
        missing = self._number_of_workers - len(self._workers)
        starts = (Worker.start(self._start) for _ in range(missing))
        results = await asyncio.gather(*starts, return_exceptions=True)
        self._workers += [worker for worker in results if isinstance(worker, Worker)]
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def _end(self) -> None:
        await asyncio.gather(*(w.end() for w in [*self._workers, *self._ended]))
