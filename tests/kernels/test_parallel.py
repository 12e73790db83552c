"""Tensor parallelism over 4 and 2 gloo ranks, with padded shards, equals float64 of the whole head.

It does not exercise NCCL, nor the overlap of communication with products.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.parallel_worker import RANKS
from tests.workers import run_ranks


@pytest.mark.usefixtures("cpu_kernel")
@pytest.mark.timeout(600)
def test_shards_of_4_and_2_ranks_equal_the_whole_head(tmp_path: Path) -> None:
    run_ranks("tests.kernels.parallel_worker", RANKS, tmp_path, 550)
    assert all((tmp_path / f"done.{rank}").exists() for rank in range(RANKS))
