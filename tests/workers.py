"""Gloo ranks for a test: `main(rank, folder)` of a worker module, in forks of one process.

Importing Megatron costs seconds and one import serves all ranks. The process that imports is not
pytest's: it has threads and worlds of its own, which a fork must not copy.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_ranks(worker: str, ranks: int, folder: Path, seconds: float) -> None:
    """Run the worker module's ranks to their end; none of them outlives this call.

    Args:
        worker: module with `main(rank, folder)`.
        ranks: processes.
        folder: what they are given, and where they write; their output goes to `ranks.log` there.
        seconds: time-out.

    Raises:
        AssertionError: a rank failed, or time ran out; with the end of the output.
    """
    log = folder / "ranks.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers", worker, str(ranks), str(folder)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    code: int | str = f"none within {seconds} s"
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert code == 0, f"{worker} over {ranks} ranks: exit code {code}\n{log.read_text()[-6000:]}"


def main(worker: str, ranks: int, folder: Path) -> int:
    module = importlib.import_module(worker)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=module.main, args=(r, folder)) for r in range(ranks)]
    for process in processes:
        process.start()
    while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes):
        time.sleep(0.05)
    for process in processes:
        if process.is_alive():  # waiting for the one that failed
            process.kill()
        process.join()
    return max(abs(p.exitcode or 0) for p in processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
