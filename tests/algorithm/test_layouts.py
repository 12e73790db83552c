"""The gradient of a batch is the same in any split, order and parallel layout, for all algorithms.

The measure is |g - g'| / |terms| of every parameter tensor, against one process that takes one
sequence at a time; the terms are the absolute values of the gradients of single sequences. 1e-6
leaves fp32 some room: measured are .1e-6 to .4e-6, most of it from products of matrices. The
model's matrices have the standard deviation of its `initializer_range`; five times larger ones
amplify the same rounding fourfold.

Not exercised: GPUs and expert parallelism (`tests/trainer/test_layouts.py` has the latter, and all
layouts' optimizer steps, checkpoints and exports, for CISPO).
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
    """Run all layouts once: distances from the gradient of one process, sequence by sequence."""
    folder = tmp_path_factory.mktemp("layouts")
    write_model(folder / "model", "tiny_dense", INITIAL, vocab_size=ODD_VOCABULARY)
    write_model(folder / "moved", "tiny_dense", 1.1 * INITIAL, vocab_size=ODD_VOCABULARY)
    run_ranks("tests.algorithm.layout_worker", RANKS, folder, seconds=550)
    return torch.load(folder / "found.pt")


def too_far(found: Any, where: str) -> dict[str, Any]:
    """Return the tensors beyond the tolerance, by algorithm or by layout."""
    return {
        name: {tensor: d for tensor, d in distances.items() if not d <= TOLERANCE}
        for name, distances in found[where].items()
        if not max(distances.values()) <= TOLERANCE
    }


def test_gradients_are_the_same_in_every_split_and_layout(found: Any) -> None:
    for where in (*SPLITS, *LAYOUTS):
        assert set(found[where]) == set(ALGORITHMS), where
    assert {where: bad for where in (*SPLITS, *LAYOUTS) if (bad := too_far(found, where))} == {}


def test_every_algorithm_has_a_gradient_of_its_own(found: Any) -> None:
    norms = found["norms"]
    assert all(norm > 0 for norm in norms.values())
    assert len({round(norm, 12) for norm in norms.values()}) == len(ALGORITHMS)


def test_a_rank_with_an_empty_share_stays_in_step(found: Any) -> None:
    assert set(found["few"]) == set(LAYOUTS)
    assert too_far(found, "few") == {}
