"""Entry point inside the sandbox: fork a process per test, feed it and bound it.

Standard library only: a bare interpreter gets this file's text. One JSON job comes in on standard
input, one JSON line per test goes out. Expected outputs never come in here, so a program can
neither read nor forge a verdict; it can only print.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

PRELUDE = (
    "import sys, math, re, string, random, itertools, functools, collections, heapq, bisect, copy\n"
    "import operator\n"
    "from typing import *\nfrom collections import *\nfrom functools import *\n"
    "from itertools import *\nfrom heapq import *\nfrom bisect import *\nfrom math import *\n"
)
ERROR_BYTES = 2000
SETUP_SECONDS = 30.0


def main() -> None:
    """Run the tests of the job on standard input."""
    job = json.loads(sys.stdin.buffer.read())
    take_uid(job.get("uid"))
    libc = ctypes.CDLL(None)
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the program cannot look into this process
    channel = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for test in job["tests"]:
        result = run_test(job, test, libc, channel)
        channel.write(json.dumps(result).encode() + b"\n")
        channel.flush()
        if job.get("namespace"):
            # Kill what the test left behind; without a process namespace it can start no process.
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)


def take_uid(uid: int | None) -> None:
    """Drop root for a user id of the sandbox's own; None keeps the user."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def run_test(
    job: dict[str, Any], test: dict[str, Any], libc: ctypes.CDLL, channel: BinaryIO
) -> dict[str, Any]:
    """Run the program on one test and return its result."""
    stdin = os.memfd_create("stdin")
    with open(stdin, "wb", closefd=False) as file:
        file.write(test.get("stdin", "").encode("utf-8", "replace"))
        file.seek(0)
    (out_read, out_write), (error_read, error_write) = os.pipe(), os.pipe()
    (value_read, value_write), (ready_read, ready_write) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        for source, target in ((stdin, 0), (out_write, 1), (error_write, 2)):
            os.dup2(source, target)
        ends = (stdin, out_read, out_write, error_read, error_write, value_read, ready_read)
        for fd in (*ends, channel.fileno()):
            os.close(fd)
        become_program(job, test, libc, value_write, ready_write)
    for fd in (stdin, out_write, error_write, value_write, ready_write):
        os.close(fd)
    # The clock starts when the limits are set; the program runs only after that.
    ready = select.select([ready_read], [], [], SETUP_SECONDS)[0] and os.read(ready_read, 1)
    os.close(ready_read)
    started = time.monotonic()
    limits = {out_read: job["output_bytes"], error_read: 1 << 20, value_read: job["output_bytes"]}
    texts, stopped = collect(limits, started + job["wall_seconds"] * bool(ready))
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    for fd in limits:
        os.close(fd)
    return {
        "status": (stopped or exit_kind(status, texts[error_read])) if ready else "sandbox",
        "stdout": texts[out_read].decode("utf-8", "replace"),
        "value": texts[value_read].decode("utf-8", "replace"),
        "error": texts[error_read][-ERROR_BYTES:].decode("utf-8", "replace"),
        "seconds": round(time.monotonic() - started, 4),
    }


def exit_kind(status: int, error: bytearray) -> str:
    """Classify the exit of a process that was not stopped here."""
    if os.WIFSIGNALED(status):
        by = os.WTERMSIG(status)
        if by in (signal.SIGPROF, signal.SIGXCPU):
            return "cpu"
        return "file" if by == signal.SIGXFSZ else f"signal {by}"
    if os.WEXITSTATUS(status) == 0:
        return "ok"
    return "memory" if b"MemoryError" in error[-ERROR_BYTES:] else "error"


def collect(limits: dict[int, int], deadline: float) -> tuple[dict[int, bytearray], str]:
    """Read each pipe until all are closed, one is over its limit, or time is up."""
    texts = {fd: bytearray() for fd in limits}
    open_fds = set(limits)
    while open_fds:
        left = deadline - time.monotonic()
        ready = select.select(list(open_fds), [], [], max(left, 0))[0]
        if not ready:
            return texts, "time"
        for fd in ready:
            part = os.read(fd, 1 << 16)
            if not part:
                open_fds.discard(fd)
            texts[fd] += part
            if len(texts[fd]) > limits[fd]:
                if limits[fd] == 1 << 20:
                    del texts[fd][: -ERROR_BYTES * 2]
                    continue
                return texts, "output"
    return texts, ""


def become_program(
    job: dict[str, Any], test: dict[str, Any], libc: ctypes.CDLL, value_fd: int, ready_fd: int
) -> NoReturn:
    """Limit this process, run the program in it, and end it."""
    code = 1
    try:
        os.setsid()
        limit(job)
        libc.prctl(4, 1, 0, 0, 0)
        take_uid(job.get("program_uid"))
        if "seccomp" in job:
            sys.path.append(job["library"])
            make_filter(job["seccomp"]).load()  # bubblewrap loads the filter of strong isolation
        os.write(ready_fd, b"1")
        os.close(ready_fd)
        source = job["source"]
        job.clear()
        code = execute(source, test, value_fd)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        if isinstance(e.code, str):
            sys.stderr.write(e.code)
    except BaseException:  # noqa: BLE001 - a program may raise anything
        import traceback

        traceback.print_exc()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
    os._exit(code & 0xFF)


def limit(job: dict[str, Any]) -> None:
    """Set the limits of the program's process."""
    cpu = max(1, int(job["cpu_seconds"] + 0.999))
    table = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: (job["memory_bytes"],) * 2,
        resource.RLIMIT_FSIZE: (job["file_bytes"],) * 2,
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
    }
    if job.get("processes"):
        table[resource.RLIMIT_NPROC] = (job["processes"],) * 2
    for kind, (soft, hard) in table.items():
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))
    # RLIMIT_CPU counts whole seconds; this timer is exact, but a program may ignore its signal.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, job["cpu_seconds"])


def make_filter(rules: list[Any]) -> Any:
    """Return pyseccomp's filter of rules (see `isolation.Rule`)."""
    import pyseccomp

    filter_ = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name, error, arguments in rules:
        match = [
            pyseccomp.Arg(p, getattr(pyseccomp, o), os.getpid() if a == "pid" else a, b)
            for p, o, a, b in arguments
        ]
        with contextlib.suppress(OSError):  # a system call that this architecture lacks
            filter_.add_rule(pyseccomp.ERRNO(error), name, *match)
    return filter_


def execute(source: str, test: dict[str, Any], value_fd: int) -> int:
    """Run the program, make the test's call, and return the exit status."""
    import types

    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    text: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "closefd": False}
    sys.stdout = open(1, "w", **text)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, **text)  # noqa: SIM115
    sys.argv = ["program.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    space = module.__dict__
    if "call" not in test and "asserts" not in test:
        os.close(value_fd)
        exec(compile(source, "program.py", "exec"), space)
        return 0
    space["__name__"] = "program"
    exec(PRELUDE, space)
    exec(compile(source, "program.py", "exec"), space)
    if "asserts" in test:
        value = [eval(compile(check, "test", "eval"), space) for check in test["asserts"]]
    else:
        value = find(space, test["call"])(*test["args"])
    with open(value_fd, "w") as file:
        json.dump(plain(value), file)
    return 0


def find(space: dict[str, Any], name: str) -> Callable[..., Any]:
    """Return a function of the program, or a method of its class Solution."""
    if name in space:
        return space[name]
    solution = space.get("Solution")
    if solution is None or not hasattr(solution, name):
        raise NameError(f"the program defines no {name}")
    return getattr(solution(), name)


def plain(value: Any) -> Any:
    """Convert a value to JSON types: tuples to lists, sets to sorted lists."""
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(v) for v in value), key=repr)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return repr(value)


if __name__ == "__main__":
    main()
