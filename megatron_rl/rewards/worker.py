"""A worker: one process that loads the libraries once (the nursery), and its child that judges.

The nursery is single-threaded and only waits, so a child is forked in milliseconds, whether the old
one was killed at its time limit, crashed or left because of the leak limit. A child sets kernel
timers on itself whose default action kills it: the limit holds without the help of any Python code,
in the middle of any C function, and if the pool is gone. The nursery then tells the pool what the
child died of.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
from dataclasses import replace
from typing import NoReturn

import msgspec

from megatron_rl.rewards.base import Outcome, Verdict, VerifierError
from megatron_rl.rewards.protocol import (
    HEADER,
    Garbled,
    Request,
    Response,
    body_length,
    frame,
    read_request,
)
from megatron_rl.rewards.task_verifiers import Judge, judge_of
from megatron_rl.rewards.verifier_settings import VerifierSettings

READY = -1
RECYCLED, LOST = 3, 4
_STATE = struct.Struct("<qq")
IDLE, READING, BUSY = 0, 1, 2
PR_SET_PDEATHSIG = 1
MAX_REASON = 1000


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """First frame of the pool: what the worker is for."""

    settings: str
    """`VerifierSettings` as JSON."""
    kinds: tuple[str, ...]


def main(fd: int) -> NoReturn:
    """Serve the pool at the other end of the socket until it is closed."""
    connection = socket.socket(fileno=fd)
    start = msgspec.msgpack.decode(_receive(connection), type=Start)
    settings = VerifierSettings.model_validate_json(start.settings)
    try:
        judges = {kind: judge_of(kind, settings) for kind in start.kinds}
    except VerifierError as e:
        connection.sendall(frame(Response(id=READY, status="down", reason=str(e))))
        sys.exit(1)
    gc.freeze()
    connection.sendall(frame(Response(id=READY, status="ready")))
    state = mmap.mmap(-1, _STATE.size)
    while True:
        _STATE.pack_into(state, 0, IDLE, 0)
        child = os.fork()
        if child == 0:
            _child(connection, state, judges, settings)
        _, status = os.waitpid(child, 0)
        phase, request = _STATE.unpack_from(state)
        if os.WIFEXITED(status):
            code = os.WEXITSTATUS(status)
            if code == RECYCLED:
                continue
            sys.exit(code)
        if phase == READING:
            sys.exit(LOST)
        if phase == BUSY:
            died = Response(id=request, status="died", signal=os.WTERMSIG(status))
            connection.sendall(frame(died))


def _child(
    connection: socket.socket,
    state: mmap.mmap,
    judges: dict[str, Judge],
    settings: VerifierSettings,
) -> NoReturn:
    _die_with_parent()
    _limit_memory(settings.memory_mib)
    start, count = _resident_mib(), 0
    code = 0
    # Not `select`: the number is the parent's, and may be beyond 1023.
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    try:
        while True:
            # Nothing is consumed before the state says so: a child killed here loses nothing.
            waiting.poll()
            _STATE.pack_into(state, 0, READING, 0)
            try:
                request = read_request(_receive(connection))
            except EOFError:
                break
            _STATE.pack_into(state, 0, BUSY, request.id)
            response = _answer(request, judges, settings)
            connection.sendall(frame(response))
            _STATE.pack_into(state, 0, IDLE, 0)
            count += 1
            grown = _resident_mib() - start if count % 64 == 0 else 0
            if count >= settings.verdicts_per_worker or grown > settings.growth_mib:
                code = RECYCLED
                break
    except (Garbled, msgspec.DecodeError, OSError):
        code = LOST
    # No interpreter shutdown: everything that it would do belongs to the nursery.
    os._exit(code)


def _answer(request: Request, judges: dict[str, Judge], settings: VerifierSettings) -> Response:
    extra = settings.sandbox.total_seconds + 10.0 if request.kind == "code" else 0.0
    signal.setitimer(signal.ITIMER_PROF, settings.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, settings.wall_seconds + extra)
    try:
        verdict = judges[request.kind](request.completion, request.gold, request.meta)
    except VerifierError as e:
        return Response(id=request.id, status="down", reason=str(e)[:MAX_REASON])
    except MemoryError:
        verdict = Verdict(Outcome.TIMED_OUT, f"over the memory limit of {settings.memory_mib} MiB")
    except Exception as e:  # noqa: BLE001 - reported to the pool, which counts and bounds these
        reason = f"{type(e).__name__}: {e}"[:MAX_REASON]
        return Response(id=request.id, status="bug", reason=reason)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    verdict = replace(verdict, reason=verdict.reason[:MAX_REASON])
    return Response(id=request.id, status="verdict", verdict=verdict)


def _receive(connection: socket.socket) -> bytes:
    """Body of the next frame.

    Raises:
        EOFError: the pool closed the socket.
    """
    return _exactly(connection, body_length(_exactly(connection, HEADER.size)))


def _exactly(connection: socket.socket, size: int) -> bytes:
    out = bytearray()
    while len(out) < size:
        part = connection.recv(min(size - len(out), 1 << 20))
        if not part:
            raise EOFError
        out += part
    return bytes(out)


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(LOST)


def _limit_memory(extra_mib: int) -> None:
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
    limit = pages * resource.getpagesize() + extra_mib * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main(int(sys.argv[1]))
