"""A rank of a run that only signs, by the real writer, until it is stopped.

python -m tests.signing_rank OUTPUT_DIR ROLE RANK SECONDS

SECONDS is the limit of its state, a sum of three of the run's time-outs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_rl import liveness
from megatron_rl.config import RunConfig

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def config(output: Path, seconds: float) -> RunConfig:
    """Return a run whose ranks may be silent for so long while they train or generate."""
    names = ("batch_seconds", "startup_seconds", "shutdown_seconds")
    return RunConfig(output_dir=output, timeouts=dict.fromkeys(names, seconds / 3))


@contextlib.contextmanager
def signing(
    output: Path, seconds: float, role: str = "trainer", rank: int = 0, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """Run such a process, which has signed when the block begins."""
    command = [sys.executable, "-m", __name__, str(output), role, str(rank), str(seconds)]
    environment = {**os.environ, **variables}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "signed\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def probe(*command: str, **variables: str) -> tuple[int, str]:
    """Run a probe as the kubelet does; return its exit status and output."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, env={**os.environ, "PATH": path, **variables},
        stdout=subprocess.PIPE, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def passes(*command: str, seconds: float = 120.0, **variables: str) -> None:
    """Wait until a probe passes: on a busy machine, the ranks sign late.

    Raises:
        AssertionError: it did not pass in so many seconds.
    """
    deadline = time.monotonic() + seconds
    while (answer := probe(*command, **variables))[0]:
        assert time.monotonic() < deadline, answer


if __name__ == "__main__":
    output, role, rank, seconds = sys.argv[1:]
    assert role in ("trainer", "generator")
    liveness.begin(config(Path(output), float(seconds)), role, int(rank))
    step = 0
    while True:
        liveness.sign("training" if role == "trainer" else "generating", step)
        if step == 0:
            print("signed", flush=True)
        time.sleep(0.1)
        step += 1
