"""Entry point of a verifier worker: a fork server and its child, which verifies completions.

The fork server loads the libraries once, stays single-threaded and only waits, so a new child takes
milliseconds, whether the previous one was killed at its time limit, crashed or exited at the leak
limit. The child arms kernel timers whose default action kills it: the limit holds inside any C
function, and without the pool. The fork server reports the signal that killed its child.

A message on the socket is its length (4 bytes, little endian) and its MessagePack. The pool sends
one `Request` at a time and waits for the `Reply`.
"""

import ctypes
import gc
import mmap
import os
import resource
import signal
import socket
import sys
from typing import Any, BinaryIO, Literal, NoReturn

import msgspec

from megatron_rl.rewards.base import Outcome, Verdict, Verifier, VerifierError
from megatron_rl.rewards.task_verifiers import make_verifier
from megatron_rl.rewards.verifier_settings import VerifierSettings

Request = tuple[str, str, str, dict[str, Any]]  # task kind, completion, gold answer, `meta`
Verifiers = dict[str, Verifier]

RECYCLED = 3  # exit status of a child that reached the leak limit
IDLE, TRANSFER, VERIFYING = 0, 1, 2  # phases of a child, in memory shared with the fork server
PR_SET_PDEATHSIG = 1
MAX_REASON = 1000


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer to its start or to a request."""

    status: Literal["ready", "verdict", "killed", "down", "bug"]
    """`ready` (the worker started), `verdict`, `killed` (the child, by `signal`), `down` (the
    verifier cannot work; `reason` has the remedy), `bug` (an unexpected exception)."""
    verdict: Verdict | None = None
    reason: str = ""
    signal: int = 0


def encode(message: Request | Reply) -> bytes:
    """Return the bytes of a message."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


def receive(stream: BinaryIO) -> bytes:
    """Return the MessagePack of the next message; `EOFError` if the connection was closed."""
    header = stream.read(4)
    length = int.from_bytes(header, "little")
    body = stream.read(length)
    if len(header) < 4 or len(body) < length:
        raise EOFError("the connection was closed")
    return body


def wall_limit(settings: VerifierSettings, kind: str) -> float:
    """Return the wall-clock limit of one verdict in seconds."""
    return settings.wall_seconds + (kind == "code") * (settings.sandbox.total_seconds + 10.0)


def main(fd: int, settings: VerifierSettings, kinds: list[str]) -> NoReturn:
    """Serve the pool at the other end of the socket until it is closed."""
    connection = socket.socket(fileno=fd)
    try:
        verifiers = {kind: make_verifier(kind, settings) for kind in kinds}
    except VerifierError as e:
        connection.sendall(encode(Reply(status="down", reason=str(e))))
        sys.exit(1)
    if "math" in kinds:
        from megatron_rl.rewards.math import stock

        # Re-arm the verdict's timer: the rest of its CPU time would be too much.
        seconds = settings.math.stock_cpu_seconds
        stock.begin = lambda: signal.setitimer(signal.ITIMER_PROF, seconds)
    gc.freeze()
    connection.sendall(encode(Reply(status="ready")))
    phase = mmap.mmap(-1, 1)
    while True:
        phase[0] = IDLE
        child = os.fork()
        if child == 0:
            _run_child(connection, phase, verifiers, settings)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status) != RECYCLED:
                sys.exit(os.WEXITSTATUS(status))
        elif phase[0] == TRANSFER:
            sys.exit(1)  # half of a message may be lost
        elif phase[0] == VERIFYING:
            connection.sendall(encode(Reply(status="killed", signal=os.WTERMSIG(status))))


def _run_child(
    connection: socket.socket, phase: mmap.mmap, verifiers: Verifiers, settings: VerifierSettings
) -> NoReturn:
    exit_status, parent = 1, os.getppid()
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        _limit_memory(settings.memory_mib)
        stream = connection.makefile("rb")
        start_mib, count = _memory_mib()[1], 0
        while exit_status != RECYCLED:
            # Peek: nothing may be consumed before the phase says so.
            connection.recv(1, socket.MSG_PEEK)
            phase[0] = TRANSFER
            request = msgspec.msgpack.decode(receive(stream))
            phase[0] = VERIFYING
            reply = encode(_verify(request, verifiers, settings))
            phase[0] = TRANSFER
            connection.sendall(reply)
            phase[0] = IDLE
            count += 1
            grown_mib = _memory_mib()[1] - start_mib if count % 64 == 0 else 0
            if count >= settings.verdicts_per_worker or grown_mib > settings.growth_mib:
                exit_status = RECYCLED
    except (EOFError, OSError, msgspec.DecodeError):
        pass  # the connection broke
    finally:
        os._exit(exit_status)  # interpreter shutdown belongs to the fork server


def _verify(request: Request, verifiers: Verifiers, settings: VerifierSettings) -> Reply:
    kind, completion, gold, meta = request
    signal.setitimer(signal.ITIMER_PROF, settings.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_limit(settings, kind))
    try:
        verdict = verifiers[kind](completion, gold, meta)
    except VerifierError as e:
        return Reply(status="down", reason=str(e)[:MAX_REASON])
    except MemoryError:
        verdict = Verdict(Outcome.TIMED_OUT, f"over the memory limit of {settings.memory_mib} MiB")
    except Exception as e:  # noqa: BLE001 - reported to the pool, which counts and bounds these
        return Reply(status="bug", reason=f"{type(e).__name__}: {e}"[:MAX_REASON])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    reason = verdict.reason[:MAX_REASON]
    return Reply(status="verdict", verdict=Verdict(verdict.outcome, reason, verdict.reward))


def _limit_memory(extra_mib: int) -> None:
    limit = int((_memory_mib()[0] + extra_mib) * 2**20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _memory_mib() -> list[float]:
    """Return the virtual and the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return [int(pages) * resource.getpagesize() / 2**20 for pages in file.read().split()[:2]]


if __name__ == "__main__":
    main(int(sys.argv[1]), VerifierSettings.model_validate_json(sys.argv[2]), sys.argv[3:])
