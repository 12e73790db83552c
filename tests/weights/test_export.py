"""The export puts every layout's shards together exactly, for every bucket size and version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weights.export_worker import CASES, EXPORTS

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the observations of four processes in all layouts."""
    folder = tmp_path_factory.mktemp("export")
    done = subprocess.run(
        [sys.executable, "-m", "tests.weights.export_worker", str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return torch.load(folder / "found.pt")


def test_every_layout_exports_the_checkpoints_tensors_three_versions_in_a_row(found):
    assert len(found) == sum(len(layouts) for _, _, layouts in CASES.values())
    assert {label: seen["wrong"][:3] for label, seen in found.items() if seen["wrong"]} == {}


def test_a_plan_is_made_once_per_bucket_size_format_and_destination(found):
    plans = {export[1:] for export in EXPORTS}
    assert {seen["plans"] for seen in found.values()} == {len(plans)}


@pytest.mark.parametrize(
    ("case", "senders"),
    [
        ("llama tied, DP4", [0]),
        ("qwen3, TP2 PP2 VPP2", [0, 2]),  # one rank per stage
        ("llama tied, TP2 PP2 VPP2", [0, 2]),
        ("qwen3_moe, EP4", [0, 1, 2, 3]),  # one rank per expert group
        ("qwen3_moe, EP2 ETP2", [0, 2]),
        ("qwen3_moe, PP2 EP2", [0, 1, 2, 3]),
        ("llama4, EP4", [0]),  # a tensor of all experts is put together on one rank
        ("llama4, PP2 EP2", [0, 2]),
    ],
)
def test_spread_over_one_sender_per_stage_and_expert_group(found, case, senders):
    assert found[case]["senders"] == senders


def test_the_cases_cover_all_architectures():
    assert {name for name, _, _ in CASES.values()} == {
        *("tiny_dense", "tiny_qwen3", "tiny_qwen3_moe", "tiny_scout")
    }
