"""Files written piece by piece are those of the safetensors library, divided as by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.commands.convert.safetensor import (
    DTYPES,
    NAMES,
    Source,
    Writer,
    read_header,
    shard_names,
)

TENSORS = {
    "b.half": torch.randn(3, 5).half(),
    "a.wide": torch.randn(2, 3, 4),
    "a.bytes": torch.arange(7, dtype=torch.uint8),
    "é.scalar": torch.tensor(3.0, dtype=torch.float64),
    "c.empty": torch.zeros(0, 4),
    "c.fp8": torch.randn(4).to(torch.float8_e4m3fn),
}


def about(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {n: (NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()}


def test_a_written_file_is_byte_for_byte_the_librarys(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "theirs", metadata={"format": "pt"})
    with Writer(tmp_path / "ours", about(TENSORS)) as writer:
        for name in reversed(list(TENSORS)):
            writer.write(name, TENSORS[name])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_pieces_land_where_they_belong(tmp_path: Path) -> None:
    rows = torch.randn(6, 4)
    with Writer(tmp_path / "file.safetensors", about({"x": rows})) as writer:
        writer.write("x", rows[4:], 4 * 16)
        writer.write("x", rows[:4])
    source = Source(tmp_path, "file*")
    assert torch.equal(source.read("x"), rows)
    assert torch.equal(source.read("x", rows=(1, 3)), rows[1:3])
    assert torch.equal(source.read("x", index=5), rows[5])
    whole = b"".join(bytes(block) for _, block in source.blocks("x"))
    assert whole == rows.numpy().tobytes()


def test_a_file_that_was_not_written_in_full_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"not written in full: \['x'\]"),
        Writer(tmp_path / "file", about({"x": torch.zeros(6, 4)})) as writer,
    ):
        writer.write("x", torch.zeros(5, 4))


@pytest.mark.parametrize("limit", [1, 100, 200, 330, 10_000])
def test_files_are_divided_as_hugging_face_divides_them(limit: int) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    tensors = {f"layer.{i}": torch.zeros(n) for i, n in enumerate((10, 40, 5, 5, 100, 1, 25))}
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    ours = shard_names({n: t.numel() * 4 for n, t in tensors.items()}, limit)
    assert ours == theirs.filename_to_tensors


def test_every_number_format_of_a_header_is_read(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(2, dtype=dtype) for name, dtype in DTYPES.items()}
    save_file(tensors, tmp_path / "all.safetensors")
    found = read_header(tmp_path / "all.safetensors")
    assert {n: e.dtype for n, e in found.items()} == {n: n for n in DTYPES}
