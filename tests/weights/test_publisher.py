"""What the trainer's ranks publish is what they hold, and training waits for a copy alone."""

from __future__ import annotations

import pytest

from tests.weights.export_worker import WORLD
from tests.workers import run_ranks


@pytest.mark.timeout(240)
def test_four_ranks_publish(tmp_path):
    run_ranks("tests.weights.publisher_worker", WORLD, tmp_path, 200)
    assert len(list(tmp_path.glob("done*"))) == WORLD
