"""The gradient of a batch is the same in any split, order and parallel layout, for all algorithms.

The measure is |g - g'| / |g'| of every parameter tensor by itself, against one process that takes
one sequence at a time. 1e-6 leaves fp32 little room: seen are .1e-6 to .65e-6, of which products
of matrices make the most (in float64 they would leave .5e-6: each result is rounded to fp32). The
model's matrices have the standard deviation of its `initializer_range`; five times larger ones
amplify the same rounding to 2.7e-6 (tensor parallelism), of which 1.4e-6 are the single process's
own distance from float64.

Not exercised: GPUs and expert parallelism (`tests/trainer` has the latter, for CISPO).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.algorithm.layout_worker import ALGORITHMS, LAYOUTS, SPLITS
from tests.trainer.cases import ODD_VOCABULARY, write_model
from tests.workers import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
RANKS = 4
TOLERANCE = 1e-6
INITIAL = 0.2
"""Scale of the matrices: a standard deviation of 0.02."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Distances from the gradient of one process with one sequence in each micro-batch."""
    folder = tmp_path_factory.mktemp("layouts")
    write_model(folder / "model", "tiny_dense", INITIAL, vocab_size=ODD_VOCABULARY)
    write_model(folder / "moved", "tiny_dense", 1.1 * INITIAL, vocab_size=ODD_VOCABULARY)
    run_ranks("tests.algorithm.layout_worker", RANKS, folder, seconds=550)
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("where", [*SPLITS, *LAYOUTS])
def test_gradients_are_the_same(found: Any, where: str) -> None:
    assert set(found[where]) == set(ALGORITHMS)
    for name, distances in found[where].items():
        worst = max(distances, key=distances.__getitem__)
        assert distances[worst] <= TOLERANCE, (name, worst, distances[worst])


def test_every_algorithm_has_a_gradient_of_its_own(found: Any) -> None:
    norms = found["norms"]
    assert all(norm > 0 for norm in norms.values())
    assert len({round(norm, 12) for norm in norms.values()}) == len(ALGORITHMS)


def test_a_rank_with_an_empty_share_stays_in_step(found: Any) -> None:
    assert set(found["few"]) == set(LAYOUTS)
    for layout, distances in found["few"].items():
        assert max(distances.values()) <= TOLERANCE, (layout, distances)
