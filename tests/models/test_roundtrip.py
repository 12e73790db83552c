"""HF -> Megatron -> HF is bit-exact in every layout of four ranks, at every version."""

from __future__ import annotations

import json
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.models.roundtrip_worker import DTYPES, MODELS, RANKS, cases, layouts
from tests.trainer.cases import write_model
from tests.workers import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run all layouts once: faults by layout, and by model and number format."""
    folder = tmp_path_factory.mktemp("roundtrip")
    for name, (tiny, changes) in MODELS.items():
        source = write_model(folder / "fp32" / name, tiny, **changes)
        tensors = load_file(source / "model.safetensors")
        copy = folder / "bf16" / name
        copy.mkdir(parents=True)
        (copy / "config.json").write_text((source / "config.json").read_text())
        halves = {n: t.to(DTYPES["bf16"]) for n, t in tensors.items()}
        save_file(halves, copy / "model.safetensors")
    run_ranks("tests.models.roundtrip_worker", RANKS, folder, seconds=550)
    return json.loads((folder / "found.json").read_text())


def test_names_and_every_bit_of_three_versions_equal_the_checkpoint(found: Any) -> None:
    assert found == {
        layout: {f"{name} {dtype}": [] for name, dtype in cases(layout)} for layout in layouts()
    }
