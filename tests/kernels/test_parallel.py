"""Tensor parallelism over 4 and 2 gloo ranks, with padded shards, equals float64 of the whole head.

It does not exercise NCCL, nor the overlap of communication with products.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_shards_of_4_and_2_ranks_equal_the_whole_head(tmp_path: Path) -> None:
    file = tmp_path / "store"
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.parallel_worker", "4", str(file)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0
    assert all((tmp_path / f"store.{rank}").exists() for rank in range(4))
