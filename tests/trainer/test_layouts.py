"""Losses, gradients, weights and files are the same in every parallel layout, in fp32.

Gradients to 1e-6: |g - g'| / |terms| of every parameter tensor, against one process; the terms are
the absolute values of the gradients of single sequences. Not exercised: GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.cases import write_model
from tests.trainer.layout_worker import CHECKPOINTED, LAYOUTS, MODELS, STEPS
from tests.workers import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-6
ADAM_TOLERANCE = 2e-4
"""Adam turns a gradient of 1e-9 into a step of the size of the learning rate (1e-3) of any sign."""
INITIAL = 0.2
"""Scale of the matrices: a standard deviation of 0.02."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what two processes saw in all layouts."""
    folder = tmp_path_factory.mktemp("layouts")
    for name, (tiny, changes) in MODELS.items():
        write_model(folder / name, tiny, INITIAL, **changes)
    run_ranks("tests.trainer.layout_worker", 2, folder, seconds=550)
    return torch.load(folder / "seen.pt")


def test_names_and_first_export_equal_the_checkpoint(seen: Any) -> None:
    for layout in LAYOUTS:
        assert seen[layout]["names"], layout
        assert seen[layout]["start_is_exact"], layout


def test_metrics_and_probe_agree_with_one_process(seen: Any) -> None:
    for layout in LAYOUTS:
        for name, difference in seen[layout]["metrics"][0].items():
            assert difference <= TOLERANCE, (layout, name, difference)
        assert seen[layout]["probe"][0] <= TOLERANCE, layout
        assert seen[layout]["results"] <= 2**-11, layout  # they have 12 bits
        assert seen[layout]["tokens"] <= TOLERANCE, layout  # each token is in one rank's dump


def test_later_steps_stay_as_close_as_adam_lets_them(seen: Any) -> None:
    for layout in LAYOUTS:
        for later in seen[layout]["metrics"][1:]:
            assert max(later.values()) <= ADAM_TOLERANCE, (layout, later)
        assert max(seen[layout]["probe"]) <= ADAM_TOLERANCE, layout
        assert seen[layout]["supervised"] <= ADAM_TOLERANCE, layout


def test_gradients_agree_with_one_process(seen: Any) -> None:
    for layout in LAYOUTS:
        for name, difference in seen[layout]["gradients"].items():
            assert difference <= GRADIENT_TOLERANCE, (layout, name, difference)


def test_three_successive_exports_agree_with_one_process(seen: Any) -> None:
    for layout in LAYOUTS:
        assert seen[layout]["moved"] > 1e-3, layout
        assert seen[layout]["weights"][0] == 0.0, layout
        assert max(seen[layout]["weights"]) <= ADAM_TOLERANCE, layout


def test_a_resumed_run_repeats_the_next_step_exactly(seen: Any) -> None:
    exact = {"step": STEPS, "metrics": True, "weights": True}
    assert {name: seen[name]["resumed"] for name in CHECKPOINTED} == dict.fromkeys(
        CHECKPOINTED, exact
    )
    assert seen["one process"] == {"tiny_dense": exact, "tiny_scout": exact}


def test_a_stop_requested_on_any_rank_stops_all_at_the_same_step(seen: Any) -> None:
    assert seen["loop"] == [
        *(("published", 0), ("done", 0), ("published", 1), ("done", 1), ("published", 2)),
        *(("save", 2), ("end", 2, True)),
    ]
