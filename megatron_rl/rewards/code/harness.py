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
from typing import Any, BinaryIO

MODULES = (
    "typing string re datetime collections heapq bisect copy math random statistics itertools"
    " functools operator io sys json time"
)
# LiveCodeBench's prelude: each module's names, the modules, and last the builtins they hid.
PRELUDE = "".join(f"from {name} import *\n" for name in [*MODULES.split(), "builtins"])
PRELUDE += f"import {', '.join(MODULES.split())}\nsys.setrecursionlimit(50000)\n"
ERROR_BYTES = 2000
SETUP_SECONDS = 30.0
POLL_SECONDS = 0.05  # pause between looks at whether the program ended while a pipe is still open


def main() -> tuple[str, dict[str, Any], int] | None:
    """Run the tests of the job on standard input; return only in a test's own process.

    There it returns what `execute` needs, so that the program ends with the interpreter.
    """
    sys.set_int_max_str_digits(0)  # the time limit bounds giant integers
    job = json.loads(sys.stdin.buffer.read())
    if (uid := job.get("uid")) is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG, which the change of user cleared
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the program cannot look into this process
    # The first process of a namespace gets only signals that it handles: no SIGKILL, no SIGSTOP.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    sys.path.append(job["library"])
    exec(PRELUDE, {})  # loads the modules once, for all tests
    for test in job["tests"]:
        result = run_test(job, test, libc, channel)
        if isinstance(result, int):
            return job["source"], test, result
        channel.write(json.dumps(result).encode() + b"\n")
        channel.flush()
        if job.get("namespace"):
            # Kill what the test left behind; without a process namespace it can start no process.
            kill_others()
    return None


def kill_others() -> None:
    """Kill all other processes of the namespace and wait until none is left."""
    with contextlib.suppress(ChildProcessError):
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, 0)


def run_test(
    job: dict[str, Any], test: dict[str, Any], libc: ctypes.CDLL, channel: BinaryIO
) -> dict[str, Any] | int:
    """Fork; return the program's result here, and in its process the pipe for a value."""
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
        for fd in ends:
            os.close(fd)
        channel.close()
        become_program(job, libc, ready_write)
        return value_write
    for fd in (stdin, out_write, error_write, value_write, ready_write):
        os.close(fd)
    # The clock starts when the limits are set; the program runs only after that.
    ready = select.select([ready_read], [], [], SETUP_SECONDS)[0] and os.read(ready_read, 1)
    os.close(ready_read)
    started = time.monotonic()
    limits = {out_read: job["output_bytes"], error_read: 0, value_read: job["output_bytes"]}
    texts, stopped = collect(child, limits, started + job["wall_seconds"] * bool(ready))
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


def collect(
    child: int, limits: dict[int, int], deadline: float
) -> tuple[dict[int, bytearray], str]:
    """Read each pipe until all are closed, the child ended, one is over its limit, or time is up.

    Of a pipe with limit 0 only the end is kept.
    """
    texts = {fd: bytearray() for fd in limits}
    open_fds = set(limits)
    ended = False
    while open_fds:
        left = deadline - time.monotonic()
        if left <= 0:
            return texts, "time"
        wait = 0 if ended else min(left, POLL_SECONDS)
        ready = select.select(list(open_fds), [], [], wait)[0]
        if not ready:
            if ended:
                break  # what still holds a pipe is a process that the program left behind
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ended = os.waitid(os.P_PID, child, flags) is not None
        for fd in ready:
            part = os.read(fd, 1 << 16)
            if not part:
                open_fds.discard(fd)
            texts[fd] += part
            if not limits[fd]:
                del texts[fd][: -ERROR_BYTES * 2]
            elif len(texts[fd]) > limits[fd]:
                return texts, "output"
    return texts, ""


def become_program(job: dict[str, Any], libc: ctypes.CDLL, ready_fd: int) -> None:
    """Limit this process and say that it is ready for the program."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    limit(job)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    libc.prctl(4, 1, 0, 0, 0)
    if "seccomp" in job:
        make_filter(job["seccomp"]).load()  # bubblewrap loads the filter of strong isolation
    os.write(ready_fd, b"1")
    os.close(ready_fd)


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


def execute(source: str, test: dict[str, Any], value_fd: int) -> None:
    """Run the program as `__main__`, or the test's call or script after it, and send the value."""
    import types

    text: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "closefd": False}
    sys.stdin = sys.__stdin__ = open(0, **text)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", **text)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, **text)  # type: ignore[misc]  # noqa: SIM115
    sys.argv = ["program.py"]
    module = types.ModuleType("__main__")
    # KodCode's tests import from `solution`.
    sys.modules["__main__"] = sys.modules["solution"] = module
    space = module.__dict__
    exec(PRELUDE, space)
    program = compile(source, "program.py", "exec", dont_inherit=True)
    if "stdin" in test:
        del sys.modules["solution"]
        os.close(value_fd)
        exec(program, space)
        return
    space["__name__"] = "program"
    exec(program, space)
    if "call" in test:
        value = plain(find(space, test["call"])(*test["args"]))
    else:
        value = []
        space["__assert__"] = lambda index, left: value.append([index, plain(left)])
        exec(compile(test["script"], "test", "exec", dont_inherit=True), space)
    with open(value_fd, "w") as file:
        json.dump(value, file)


def find(space: dict[str, Any], name: str) -> Callable[..., Any]:
    """Return a method of the program's class Solution, or a function of the program."""
    solution: Any = space.get("Solution")
    if hasattr(solution, name):  # first, because the prelude has functions of many names
        return getattr(solution(), name)
    if name not in space:
        raise NameError(f"the program defines no {name}")
    return space[name]


def plain(value: Any) -> Any:
    """Convert a value to JSON that `cases.decode` reads: other types as [type, content]."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [plain(v) for v in value]]
    if isinstance(value, dict):
        return ["dict", [[plain(k), plain(v)] for k, v in value.items()]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, int):
        return ["int", hex(value)]
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return plain(value.item())
    return ["object", repr(value)[:200]]


if __name__ == "__main__" and (program := main()):
    execute(*program)
