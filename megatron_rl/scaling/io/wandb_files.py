"""Offline runs of wandb: the logged rows in ``wandb/offline-run-*/run-<id>.wandb``.

A run that was resumed offline has a folder for each start, all with one id. A file has 7 bytes,
then a LevelDB log in blocks of 32 KiB: crc32 (4 bytes), length (2) and type (1) of a part, and the
part of a protobuf `Record`; wandb has no public reader.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import PointsError, require
from .table import Table

MAGIC, HEADER, BLOCK, PART = b":W&B", 7, 32768, 7  # bytes; PART: of the header of a part
WHOLE, LAST = 1, 4


def wandb_files(path: Path) -> list[Path]:
    """Return the files of the runs at or below a path, oldest first; none if others are there."""
    path = path.resolve()
    if (path / "metrics.jsonl").exists() or any(path.rglob("*tfevents*")):
        return []
    here = [path] if path.suffix == ".wandb" else path.rglob("run-*.wandb")
    starts = {start for file in here for start in file.parent.parent.glob(f"*/{file.name}")}
    starts = {start for start in starts if not start.parent.is_symlink()}
    return sorted(starts, key=lambda start: start.parent.name.rpartition("run-")[2])


def read_wandb(path: Path) -> Table:
    """Read the rows of offline runs; the column `run` has their names."""
    messages = require("wandb.proto.wandb_internal_pb2", f"Reading {path}", "io")
    names: dict[str, str] = {}  # of the file, which has the run's id -> of the run
    logged: list[tuple[str, dict[str, Any]]] = []
    repairs: list[str] = []
    for file in wandb_files(path):
        for part in _records(file, repairs):
            record = messages.Record.FromString(part)
            if record.HasField("run"):
                names[file.stem] = record.run.display_name
            if record.HasField("history"):
                items = record.history.item
                cells = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
                logged.append((file.stem, cells))
    if not logged:
        raise PointsError("nothing is logged", "Give the run's metrics.jsonl", file=str(path))
    shared = len({*names.values()}) < len(names)
    shown = {key: f"{name} ({key})" if shared else name for key, name in names.items()}
    rows = [(n, {**row, "run": shown.get(key, key)}) for n, (key, row) in enumerate(logged, 1)]
    return Table(str(path), path.stem, rows, repairs)


def _records(file: Path, repairs: list[str]) -> Iterator[bytes]:
    """Yield the whole records; a kill may leave a torn one at the end."""
    data, at, record = file.read_bytes(), HEADER, b""
    if data[:4] != MAGIC:
        remedy = "Give run-<id>.wandb of an offline run, or the CSV exported from a chart"
        raise PointsError("not a file of a wandb run", remedy, file=str(file))
    while at + PART <= len(data):
        if (left := BLOCK - at % BLOCK) < PART:  # the rest of a block is padding
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        at += PART + length
        if at > len(data):
            repairs.append(f"{file.name}: the torn end was left out")
            return
        record += data[at - length : at]
        if kind in (WHOLE, LAST):
            yield record
            record = b""
