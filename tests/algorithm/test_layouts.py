"""The gradient of a batch is the same in any split, order and parallel layout, for all algorithms.

Not exercised: GPUs, expert parallelism and sequence parallelism (`tests/policy` has the latter two
for CISPO), and context parallelism, which the trainer refuses.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.algorithm.layout_worker import ALGORITHMS, LAYOUTS
from tests.policy.cases import ODD_VOCABULARY, write_model

pytestmark = pytest.mark.e2e
RANKS = 4
TOLERANCE = 2e-6
"""Of the whole gradient, relative to its norm. What is seen is .4e-6 to 1.5e-6: sums of fp32 in
another order, in a gradient whose sequences cancel each other."""


def start(rank: int, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.algorithm.layout_worker", str(rank), str(folder)],
            cwd=Path(__file__).parents[2],
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Distances from the gradient of one process with one sequence in each micro-batch."""
    folder = tmp_path_factory.mktemp("layouts")
    write_model(folder / "model", "tiny_dense", vocab_size=ODD_VOCABULARY)
    write_model(folder / "moved", "tiny_dense", scale=1.1, vocab_size=ODD_VOCABULARY)
    logs = [folder / f"rank{rank}.log" for rank in range(RANKS)]
    workers = [start(rank, folder, log) for rank, log in enumerate(logs)]
    try:
        until = time.monotonic() + 280
        while any(w.poll() is None for w in workers) and not any(w.poll() for w in workers):
            assert time.monotonic() < until, [log.read_text()[-2000:] for log in logs]
            time.sleep(0.2)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for worker, log in zip(workers, logs, strict=True):
        assert worker.returncode == 0, log.read_text()[-6000:]
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("where", ["some", "all", "order", *LAYOUTS])
def test_gradients_are_the_same(found: Any, where: str) -> None:
    assert set(found[where]) == set(ALGORITHMS)
    for name, distance in found[where].items():
        assert distance <= TOLERANCE, (name, distance)


def test_every_algorithm_has_a_gradient_of_its_own(found: Any) -> None:
    norms = found["norms"]
    assert all(norm > 0 for norm in norms.values())
    assert len({round(norm, 12) for norm in norms.values()}) == len(ALGORITHMS)


def test_a_rank_with_an_empty_share_stays_in_step(found: Any) -> None:
    assert set(found["few"]) == set(LAYOUTS)
    assert max(found["few"].values()) <= TOLERANCE, found["few"]
