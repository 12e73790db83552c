"""The export joins every layout's shards exactly, and the ranks share the work of a version."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.weights.export_worker import CASES, EXPORTS, LAYOUTS, WORLD
from tests.workers import run_ranks

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the observations of four processes in all layouts."""
    folder = tmp_path_factory.mktemp("export")
    run_ranks("tests.weights.export_worker", WORLD, folder, seconds=550)
    return torch.load(folder / "seen.pt")


def test_every_layout_exports_the_right_tensors_three_versions_in_a_row(seen):
    assert len(seen) == sum(len(layouts) for _, _, layouts in CASES.values())
    assert {label: case["wrong"][:3] for label, case in seen.items() if case["wrong"]} == {}


def test_a_plan_is_made_once_per_bucket_size_format_and_destination(seen):
    plans = {export[1:] for export in EXPORTS}
    assert {case["plans"] for case in seen.values()} == {len(plans)}


def spread(seen: Any) -> Any:
    """Yield (layout's label, the ranks' shares) of each spread export."""
    for label, case in seen.items():
        assert len(case["shares"]) == sum(export[3] for export in EXPORTS)
        for shares in case["shares"]:
            yield label, shares


def test_every_rank_joins_buckets_of_which_it_holds_a_part(seen):
    for label, shares in spread(seen):
        assert [share["rank"] for share in shares] == list(range(WORLD)), label
        assert [share["not held"] for share in shares] == [[]] * WORLD, label


def test_replicas_join_the_same_bytes_up_to_one_tensor(seen):
    replicas = 0
    for label, shares in spread(seen):
        for one in shares:
            for other in shares:
                if one["rank"] < other["rank"] and one["weights"] == other["weights"]:
                    replicas += 1
                    unevenness = abs(one["joined"] - other["joined"])
                    assert unevenness <= one["largest unit"], label
    assert replicas > 6 * len(EXPORTS)


def test_a_rank_receives_the_parts_of_its_own_buckets_that_others_hold_and_nothing_else(seen):
    for label, shares in spread(seen):
        layout = LAYOUTS[label.partition(", ")[2]]
        assert [s["received"] for s in shares] == [s["needed"] for s in shares], label
        assert all(s["largest message"] <= s["largest bucket"] for s in shares), label
        # Data and expert parallelism alone: every rank has all parts of what it joins.
        split = layout.tensor * layout.expert_tensor > 1
        assert any(s["received"] for s in shares) == split, label


def test_the_cases_cover_all_architectures():
    assert {name for name, _, _ in CASES.values()} == {
        *("tiny_dense", "tiny_qwen3", "tiny_qwen3_moe", "tiny_scout")
    }
