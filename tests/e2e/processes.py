"""Start a run, wait for its end, read its metrics."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Variables with which the supervised stage starts no torchrun."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def hide(folder: Path, *packages: str) -> str:
    """Return a PYTHONPATH without these optional packages, whose imports take every rank long."""
    for package in packages:
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise ImportError")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in the checkout; its output is appended to `log`."""
    # Without torch's compiler, which no run on CPU uses, a rank's imports take a second less.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with log.open("ab") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def finish(process: subprocess.Popen[bytes], log: Path, seconds: float = 420) -> str:
    """Wait for a successful end and return the log; stop the process after `seconds`."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        pytest.fail(f"no end after {seconds} s:\n{log.read_text()[-6000:]}")
    assert status == 0, log.read_text()[-6000:]
    return log.read_text()


def steps_done(output: Path) -> int:
    """Return the number of steps in a run's metrics.jsonl, which may not be there yet."""
    path = output / "metrics.jsonl"
    if not path.exists():
        return 0
    # Parsing all rows ten times a second would take the runs a tenth of a core.
    whole_lines, _, _ = path.read_bytes().rpartition(b"\n")
    return whole_lines.count(b'\n{"kind": "step", ')


def rows(output: Path, kind: str) -> list[dict[str, Any]]:
    """Return the rows of one kind in a run's metrics.jsonl."""
    return [row for row in read_metrics(output / "metrics.jsonl") if row["kind"] == kind]
