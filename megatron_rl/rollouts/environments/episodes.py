"""Entry point of an environment worker: many episodes at a time, on one event loop.

It ends when its socket is closed, and with the process that started it.
"""

import asyncio
import ctypes
import importlib.util
import inspect
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from megatron_rl.import_path import imported
from megatron_rl.rollouts.environments.protocol import (
    CallResult,
    Environment,
    Opening,
    Request,
    Start,
    Step,
    frame,
    receive,
)

CANCEL_SECONDS = 0.5  # for the end of a cancelled call; after it the worker is stuck
MAX_TEXT = 2000
MAX_REPLY = 2**26  # bytes, whatever its messages are
PR_SET_PDEATHSIG = 1
VERIFIERS = "verifiers:"

MakeEnvironment = Callable[[], Environment]


@asynccontextmanager
async def loaded(path: str, options: dict[str, Any]) -> AsyncIterator[MakeEnvironment]:
    """Yield what makes an environment for an episode, while that which they share is up.

    Args:
        path: `package.module:Class`, or `verifiers:NAME`.
        options: arguments of the class, or the configuration of the package's environment.
    """
    if path.startswith(VERIFIERS):
        if importlib.util.find_spec("verifiers") is None:
            raise ModuleNotFoundError(
                'the package `verifiers` is not installed: pip install "megatron_rl[environments]"'
            )
        from megatron_rl.rollouts.environments import verifiers_adapter as adapter

        environments = adapter.VerifiersEnvironments(path.removeprefix(VERIFIERS), options)
        async with environments.serving():
            yield partial(adapter.VerifiersEpisode, environments)
    else:
        yield partial(imported(path), **options)


class RunningEpisode:
    """An episode's environment, its thread and the call that runs."""

    def __init__(self, make: MakeEnvironment, start: Start) -> None:
        self._make, self._start = make, start
        self._environment: Any = None
        self._executor = ThreadPoolExecutor(1, "episode")
        self._thread: Future[Any] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._closing = False

    async def answer(self, request: Request) -> CallResult:
        """Return the reply to a request, at the latest when its time is up."""
        if request.call == "close":
            return await self._bounded(request, self._close(self._task))
        reply = await self._bounded(request, self._call(request))
        if self._closing:  # no one waits for it
            return CallResult(episode=request.episode, stuck=reply.stuck)
        # A message that is too long stays here: the generator reads none of it.
        answer = reply.opening or reply.step
        longest = max((_characters(m) for m in answer.messages), default=0) if answer else 0
        try:
            size = len(frame(reply))
        except UnicodeEncodeError as e:  # half of a surrogate pair
            text = f"{request.call} returned text that is not Unicode: {e}"
            return CallResult(episode=request.episode, cause="raised", text=text[:MAX_TEXT])
        if longest > self._start.characters or size > MAX_REPLY:
            text = (
                f"the longest message of {request.call} has {longest} characters, and"
                f" {self._start.characters} are allowed (16 x rollout.tool_result_tokens;"
                f" {MAX_REPLY} bytes for all of them)"
            )
            return CallResult(episode=request.episode, cause="flooded", text=text)
        return reply

    def cancel(self) -> None:
        """Cancel the call that runs, before the request to close."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()

    async def _bounded(self, request: Request, work: Any) -> CallResult:
        self._task = task = asyncio.ensure_future(work)
        seconds, episode = self._start.seconds, request.episode
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=CANCEL_SECONDS)
            stuck = not done or (self._thread is not None and self._thread.running())
            text = f"{request.call} took longer than {seconds:g} s (rollout.environment_seconds)"
            return CallResult(episode=episode, cause="timed out", text=text, stuck=stuck)
        if task.cancelled():
            return CallResult(episode=episode, cause="raised", text=f"{request.call} was cancelled")
        if (error := task.exception()) is not None:
            text = f"{request.call} raised {type(error).__name__}: {error}"
            return CallResult(episode=episode, cause="raised", text=text[:MAX_TEXT])
        result = task.result()
        return CallResult(
            episode=episode,
            opening=result if isinstance(result, Opening) else None,
            step=result if isinstance(result, Step) else None,
        )

    async def _call(self, request: Request) -> Opening | Step:
        kind: type[Opening | Step] = Opening if request.call == "reset" else Step
        if request.call == "reset":
            self._environment = await self._run(self._make)
        result = await self._run(getattr(self._environment, request.call), request.argument)
        if not isinstance(result, kind):
            raise TypeError(f"it returned {type(result).__name__} instead of {kind.__name__}")
        return msgspec.convert(msgspec.to_builtins(result), kind)  # its fields have their types

    async def _close(self, cancelled: asyncio.Task[Any] | None) -> None:
        running: set[asyncio.Future[Any]] = {cancelled} if cancelled else set()
        if self._thread is not None:
            running.add(asyncio.wrap_future(self._thread))
        try:
            if running:
                await asyncio.wait(running)
            if close := getattr(self._environment, "close", None):
                await self._run(close)
        finally:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        self._thread = self._executor.submit(function, *arguments)
        result = await asyncio.wrap_future(self._thread)
        return await result if inspect.isawaitable(result) else result


def _characters(message: dict[str, Any]) -> int:
    content = message.get("content")
    return len(content if isinstance(content, str) else msgspec.json.encode(message))


async def serve(connection: socket.socket) -> None:
    """Serve the host at the other end of the socket until it is closed; then end the process."""
    reader, writer = await asyncio.open_connection(sock=connection)
    start = msgspec.msgpack.decode(await receive(reader), type=Start)
    async with AsyncExitStack() as shared:
        try:
            make = await shared.enter_async_context(loaded(start.path, start.options))
        except Exception as e:  # noqa: BLE001 - code of the user, whose error the host reports
            text = f"{type(e).__name__}: {e}"[:MAX_TEXT]
            writer.write(frame(CallResult(episode=0, cause="raised", text=text)))
            await writer.drain()
            return
        writer.write(frame(CallResult(episode=0)))
        await _serve_episodes(reader, writer, partial(RunningEpisode, make, start))
    os._exit(0)  # calls may never end


async def _serve_episodes(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    new_episode: Callable[[], RunningEpisode],
) -> None:
    decode = msgspec.msgpack.Decoder(Request).decode
    episodes: dict[int, RunningEpisode] = {}
    tasks: set[asyncio.Task[None]] = set()

    async def answer(episode: RunningEpisode, request: Request) -> None:
        writer.write(frame(await episode.answer(request)))

    while True:
        try:
            request = decode(await receive(reader))
        except (asyncio.IncompleteReadError, OSError):
            break
        if request.call == "reset":
            episodes[request.episode] = new_episode()
        episode = episodes.get(request.episode)
        if episode is None:
            continue  # closed without a reset
        if request.call == "close":
            del episodes[request.episode]
            episode.cancel()
        task = asyncio.create_task(answer(episode, request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for number, episode in episodes.items():
        episode.cancel()
        tasks.add(asyncio.create_task(answer(episode, Request(number, "close"))))
    if tasks:
        await asyncio.wait(tasks)  # the host kills a worker that takes too long


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    _die_with_parent(int(sys.argv[2]))
    os.set_inheritable(int(sys.argv[1]), False)  # no program that an environment starts holds it
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
