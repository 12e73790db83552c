"""Files that are replaced or appended to on a full disk, and what their checksums tell."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from megatron_rl import files
from megatron_rl.config import RunConfig, save_config
from megatron_rl.metrics import MetricsWriter


class FullDisk:
    """A file that can be opened and takes nothing."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Nothing was opened."""


def remedy(path: Path) -> str:
    return f"No space left on device: {path}: free some space there, and start it again"


def test_a_full_disk_is_named_with_the_file_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(output_dir=tmp_path, model="tiny_dense")
    save_config(config)
    old = (tmp_path / "config.yaml").read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=remedy(tmp_path / "config.yaml")) as error:
        save_config(config)
    assert error.value.errno == errno.ENOSPC
    assert (tmp_path / "config.yaml").read_bytes() == old
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_a_row_without_room_names_the_file_of_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        with monkeypatch.context() as patch, pytest.raises(OSError, match=remedy(path)):
            patch.setattr(writer, "_file", FullDisk())
            writer.write("step", {"step": 0})
        writer.write("step", {"step": 0})


def test_another_error_of_the_disk_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        files.replace_file(tmp_path / "nowhere" / "file", "")


def test_damage_is_named_by_file(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    for name in ("whole", "part/short", "part/gone", "flipped"):
        (tmp_path / name).write_bytes(bytes(range(200)))
    names = ("whole", "part/short", "part/gone", "flipped")
    sums = {name: files.size_and_sum(tmp_path / name) for name in names}
    assert files.damage(tmp_path, sums) == []
    (tmp_path / "part/short").write_bytes(bytes(range(77)))
    (tmp_path / "part/gone").unlink()
    (tmp_path / "flipped").write_bytes(bytes([1, *range(1, 200)]))
    assert files.damage(tmp_path, sums) == [
        f"{tmp_path}/part/short: it has 77 of 200 bytes",
        f"{tmp_path}/part/gone: No such file or directory",
        f"{tmp_path}/flipped: its bytes were changed after it was written (checksum)",
    ]
