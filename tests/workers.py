"""Gloo ranks for a test: `main(rank, folder)` of a worker module, in forks of one process.

Importing Megatron costs five seconds, so that one fork server per pytest process has imported it
for the ranks of all its tests. It is not pytest's process: that has threads and worlds, which a
fork must not copy.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORK = multiprocessing.get_context("fork")
PRELOADED = tuple(f"megatron_rl.trainer.{name}" for name in ("step", "sft", "checkpoint"))
"""With what they import, most of what workers need; the rest is imported after the fork."""
TORCH = ("torch._inductor.compile_fx", "torch.distributed.tensor", "torch.distributed.checkpoint")
"""What takes Megatron's import the longest, for workers that change what Megatron sees."""


@cache
def server(*preloaded: str) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start a fork server that imports these modules; it ends when this process hangs up."""
    ours, its = multiprocessing.Pipe()
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers", str(its.fileno()), *preloaded],
            cwd=ROOT, pass_fds=[its.fileno()], start_new_session=True,
        )  # fmt: skip
    return ours, process


def run_ranks(
    worker: str, ranks: int, folder: Path, seconds: float, preloaded: tuple[str, ...] = PRELOADED
) -> None:
    """Run the worker module's ranks to their end; none of them outlives this call.

    Args:
        worker: module with `main(rank, folder)`.
        ranks: processes.
        folder: what they are given, and where they write; their output goes to `ranks.log` there.
        seconds: time-out.
        preloaded: modules that are imported before the fork; `TORCH` where a worker changes what
            Megatron's import sees.

    Raises:
        AssertionError: a rank failed, or time ran out; with the end of the output.
        EOFError: the server has ended, or its imports failed; its output has the error.
    """
    code = exit_code(worker, ranks, folder, seconds, preloaded)
    log = (folder / "ranks.log").read_text()
    assert code == 0, f"{worker} over {ranks} ranks: exit code {code}\n{log[-6000:]}"


def run_script(
    code: str, folder: Path, preloaded: tuple[str, ...], seconds: float = 120
) -> tuple[int, str]:
    """Run a program in a fork that has imported these modules; return (exit code, its output).

    `folder` takes the program's files, and is the first in which it looks for modules.

    Raises:
        AssertionError: time ran out.
    """
    (folder / "script.py").write_text(code)
    status = exit_code("tests.script_worker", 1, folder, seconds, preloaded)
    log = (folder / "ranks.log").read_text()
    assert isinstance(status, int), f"exit code {status}\n{log[-6000:]}"
    return status, log


def exit_code(
    worker: str, ranks: int, folder: Path, seconds: float, preloaded: tuple[str, ...]
) -> int | str:
    """Return that of a rank that failed, 0 if none did, or text if time ran out."""
    connection, _ = server(*preloaded)
    connection.send((worker, ranks, folder, dict(os.environ)))
    leader = connection.recv()
    code: int | str = f"none within {seconds} s"
    try:
        if connection.poll(seconds):
            code = connection.recv()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        if not isinstance(code, int):
            connection.recv()
    return code


def serve(connection: Connection, preloaded: list[str]) -> None:
    """Answer every request by the id of a forked process, and by its exit code."""
    gc.disable()  # a fifth of the time of the imports, whose objects stay
    for name in preloaded:
        importlib.import_module(name)
    gc.freeze()  # the garbage collectors of the forks leave the shared pages alone
    gc.enable()
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        process = FORK.Process(target=lead, args=request)
        process.start()
        connection.send(process.pid)
        process.join()
        connection.send(process.exitcode)


def lead(worker: str, ranks: int, folder: Path, environment: Mapping[str, str]) -> None:
    """Run the ranks in a process group of their own, and exit with the code of one that failed."""
    os.setsid()
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    with (folder / "ranks.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    module = importlib.import_module(worker)
    processes = [FORK.Process(target=module.main, args=(r, folder)) for r in range(ranks)]
    for process in processes:
        process.start()
    while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes):
        time.sleep(0.05)
    for process in processes:
        if process.is_alive():  # waiting for the one that failed
            process.kill()
        process.join()
    sys.exit(max(abs(p.exitcode or 0) for p in processes))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2:])
