"""Losses, gradients, weights and files are the same in every parallel layout, in fp32.

Gradients to 1e-6: |g - g'| / |g'| of every parameter tensor by itself, against one process
(`tests/algorithm/test_layouts.py` says what makes the difference). Not exercised: GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.cases import write_model
from tests.trainer.layout_worker import CHECKPOINTED, LAYOUTS, MODELS
from tests.workers import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-6
HEAD_NORM_TOLERANCE = 3e-6
"""Cancellation leaves a ninth of the terms that make up the gradient of a head's norm."""
ROUTER_TOLERANCE = 2e-6
"""Replayed experts are by chance here: a router's gradient is a sum of either sign."""
ADAM_TOLERANCE = 2e-4
"""Adam turns a gradient of 1e-9 into a step of the size of the learning rate (1e-3) of any sign."""
INITIAL = 0.2
"""Scale of the matrices: a standard deviation of 0.02."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes saw in all layouts."""
    folder = tmp_path_factory.mktemp("layouts")
    for name, (tiny, changes) in MODELS.items():
        write_model(folder / name, tiny, INITIAL, **changes)
    run_ranks("tests.trainer.layout_worker", 2, folder, seconds=550)
    return torch.load(folder / "found.pt")


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, found: Any) -> Any:
    return found[request.param]


def test_names_and_first_export_equal_the_checkpoint(layout: Any) -> None:
    assert layout["names"]
    assert layout["start_is_exact"]


def test_metrics_and_probe_agree_with_one_process(layout: Any) -> None:
    for name, difference in layout["metrics"][0].items():
        assert difference <= TOLERANCE, (name, difference)
    assert layout["probe"][0] <= TOLERANCE


def test_later_steps_stay_as_close_as_adam_lets_them(layout: Any) -> None:
    for later in layout["metrics"][1:]:
        assert max(later.values()) <= ADAM_TOLERANCE, later
    assert max(layout["probe"]) <= ADAM_TOLERANCE
    assert layout["supervised"] <= ADAM_TOLERANCE


def test_gradients_agree_with_one_process(layout: Any) -> None:
    for name, difference in layout["gradients"].items():
        head_norm = name.endswith(("q_norm.weight", "k_norm.weight"))
        tolerance = HEAD_NORM_TOLERANCE if head_norm else GRADIENT_TOLERANCE
        if name.endswith("router.weight"):
            tolerance = ROUTER_TOLERANCE
        assert difference <= tolerance, (name, difference)


def test_three_successive_exports_agree_with_one_process(layout: Any) -> None:
    assert layout["moved"] > 1e-3
    assert layout["weights"][0] == 0.0
    assert max(layout["weights"]) <= ADAM_TOLERANCE


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_resumed_run_repeats_the_next_step_exactly(found: Any, name: str) -> None:
    assert found[name]["resumed"] == {"step": 3, "metrics": True, "weights": True}


def test_a_resumed_single_process_repeats_the_next_step_exactly(found: Any) -> None:
    exact = {"step": 3, "metrics": True, "weights": True}
    assert found["alone"] == {"tiny_dense": exact, "tiny_scout": exact}


def test_a_stop_asked_of_any_rank_stops_all_at_the_same_step(found: Any) -> None:
    assert found["loop"] == [
        *(("published", 0), ("done", 0), ("published", 1), ("done", 1), ("published", 2)),
        *(("save", 2), ("end", 2, True)),
    ]
