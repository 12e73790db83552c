"""The benchmark of the orchestrator's scale, with ten engines and short completions.

The script itself checks the batches that the trainer gets. Not exercised: a thousand engines.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "orchestrator_scale.py"
SIZES = {
    "engines": 10, "prompts": 6, "completions": 4, "tokens": 300, "report-tokens": 100, "steps": 3,
    "seconds": 0.5, "idle": 1,
}  # fmt: skip


def test_ten_engines_send_every_completion_and_its_progress_and_the_parts_are_measured() -> None:
    options = [f"--{name}={value}" for name, value in SIZES.items()]
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[0])
    assert figures["batch mib"] * 2**20 > 20 * 6 * 4 * 300  # five arrays of four bytes a token
    assert figures["peak mib"] > 50
    # Stats and pings of ten engines, each second.
    assert figures["idle frames per second"] > 5
    parts, calls = figures["parts"], figures["calls"]
    assert calls["dispatch"] < calls["handle"]  # not after each message
    assert figures["assembly"] > 0
    assert figures["encoding"] > 0
    for name in ("receive", "verify", "decode text"):
        assert parts[name] > 0, name
    assert parts["decode text"] < parts["verify"] < parts["handle"] < figures["step wall"]
    assert figures["assembly"] + figures["encoding"] < figures["step wall"]
    assert "| batch assembly, CPU seconds |" in done.stdout
