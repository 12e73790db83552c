"""Tensors of a directory are read by name, without keeping their files in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.models import CheckpointError
from megatron_rl.models.safetensors_directory import INDEX, SafetensorsDirectory

TENSORS = {
    "b.half": torch.randn(3, 5).half(),
    "a.wide": torch.randn(2, 3, 4),
    "a.bytes": torch.arange(7, dtype=torch.uint8),
    "é.scalar": torch.tensor(3.0, dtype=torch.float64),
    "c.empty": torch.zeros(0, 4),
    "c.fp8": torch.randn(4).to(torch.float8_e4m3fn),
    "d.bf16": torch.randn(2, 2).bfloat16(),
    "d.bool": torch.tensor([True, False]),
}


def test_every_number_format_is_read_with_its_shape(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = SafetensorsDirectory(tmp_path)
    assert source.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        meta, read = source.tensors[name], source.read(name)
        assert meta.is_meta and (meta.shape, meta.dtype) == (tensor.shape, tensor.dtype), name
        assert read.dtype == tensor.dtype and read.shape == tensor.shape, name
        assert torch.equal(
            read.contiguous().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
        ), name


def resident_mib() -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def test_only_the_rows_in_use_are_in_memory(tmp_path: Path) -> None:
    save_file({"x": torch.arange(2**24).view(-1, 2**14)}, tmp_path / "model.safetensors")
    source, before = SafetensorsDirectory(tmp_path), resident_mib()
    rows = source.read("x")[10:12]
    assert rows[1, 0] == 11 * 2**14
    assert resident_mib() - before < 32  # of 128 MiB
    assert source.read("x").sum() == 2**23 * (2**24 - 1)
    assert resident_mib() - before < 32


def test_an_index_that_differs_from_its_files_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"x": "one.safetensors", "y": "one.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"index.json and its files disagree on y: .*copy the"
    ):
        SafetensorsDirectory(tmp_path)
    index["weight_map"]["y"] = "two.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"two.safetensors: missing"):
        SafetensorsDirectory(tmp_path)
