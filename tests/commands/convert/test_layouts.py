"""Converted checkpoints load into every layout, and checkpoints of every layout convert back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.commands.convert import to_huggingface, to_megatron
from megatron_rl.commands.convert.resumable import Output
from tests.commands.convert.layout_worker import LAYOUTS
from tests.trainer.cases import write_model
from tests.workers import run_ranks

pytestmark = pytest.mark.e2e


def bf16(source: Path, target: Path) -> None:
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = {n: t.bfloat16() for n, t in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, their conversions, and the results of two processes in all layouts."""
    folder = tmp_path_factory.mktemp("convert")
    for name in {name.removesuffix("_bf16") for name, _ in LAYOUTS.values()}:
        write_model(folder / name, name)
        write_model(folder / f"{name}.other", name, scale=2.0)
    for name in ("tiny_dense", "tiny_scout"):
        bf16(folder / name, folder / f"{name}_bf16")
        bf16(folder / f"{name}.other", folder / f"{name}_bf16.other")
    for name in {name for name, _ in LAYOUTS.values()}:
        to_megatron.convert(folder / name, Output(folder / f"{name}.megatron", 10**5))
    run_ranks("tests.commands.convert.layout_worker", 2, folder, seconds=280)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Any:
    return torch.load(folder / "results.pt")


def test_every_layout_loads_the_converted_weights_bit_for_bit(results: Any) -> None:
    assert [layout for layout in LAYOUTS if not results[layout]["equal"]] == []


def test_a_checkpoint_of_every_layout_converts_back_byte_for_byte(
    folder: Path, results: Any, tmp_path: Path
) -> None:
    differ, name = [], "model.safetensors"
    for i, (layout, (model, _)) in enumerate(LAYOUTS.items()):
        saved, source = Path(results[layout]["saved"]), folder / model
        back = to_huggingface.convert(saved, Output(tmp_path / str(i), 10**10), source)
        if (back / name).read_bytes() != (source / name).read_bytes():
            differ.append(layout)
    assert differ == []
