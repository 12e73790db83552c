"""metrics.jsonl: the source of truth for a run's measurements.

Layout: UTF-8, one JSON object per line, each appended with one write.

    {"kind": "schema", "schema": "megatron_rl.metrics/1", "fields": {"loss": "... [nats]", ...}}
    {"kind": "event", "step": 0, "event": "started", "unix_seconds": 1.7e9}
    {"kind": "eval", "step": 0, "compute_tokens": 0, "pass_rate": 0.25, ...}
    {"kind": "sets", "step": 0, "compute_tokens": 0, "sets": {"aime2025": {"pass_rate": 0.1, ...}}}
    {"kind": "step", "step": 0, "loss": -0.01, "grad_norm": null, "nonfinite": ["grad_norm"], ...}

NaN and infinity, which JSON cannot represent, are written as null; `nonfinite` lists their names.

Recovery: a killed run can leave a torn last line, and rows of steps after its checkpoint. The next
writer moves both to `metrics.dropped-<n>.jsonl` of the same layout, before it replaces the file.
The event of the resumption has the most compute of a row that was moved.
"""

import itertools
import json
import math
import os
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_rl.files import naming_full_disk, replace_file

METRICS: dict[str, str] = yaml.safe_load((resources.files(__package__) / "names.yaml").read_text())
"""Name -> meaning and [unit]; the table is also the file's first line."""
COMPUTE = (*(name for name in METRICS if name.startswith("compute_")), "wall_seconds")
"""Cumulative metrics, in every step and eval row."""
SPENT = tuple(name for name in COMPUTE if "_train_" not in name)
"""Those that count all that ran: they never go back, whatever a resumed run trains again."""

SCHEMA = "megatron_rl.metrics/1"
NUMBERED = ("step", "eval", "sets")  # kinds of rows that belong to a step
_BLOCK = 1 << 18  # bytes that are read at once from the end, more than a line
Row = dict[str, Any]
SCHEMA_ROW: Row = {"kind": "schema", "schema": SCHEMA, "fields": METRICS}


class MetricsError(ValueError):
    """An invalid row or file of metrics; the message names the file or the field."""


class MetricsWriter:
    """Appends rows to metrics.jsonl; one writer per file (`run_lock`).

    All rows of an existing file are moved aside, or, to continue from the checkpoint with
    `resume_step` updates, step rows from it on and evaluations after it; events stay.

    Raises:
        MetricsError: the file has another schema.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None) -> None:
        self.path, dropped = Path(path), None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            dropped = _move_aside(self.path, self.path.read_bytes(), resume_step)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        if self._file.tell() == 0:
            self._append(SCHEMA_ROW)
        if resume_step is not None:
            self.write("event", {"step": resume_step, "event": "resumed", **(dropped or {})})

    def close(self) -> None:
        """Flush all rows to disk and close the file; a second call does nothing."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def write(self, kind: str, row: Row) -> Row:
        """Append a row and return it.

        `row["step"]` is the index of the update (kind `step`) or the weight version (evaluations:
        `eval` and `sets`); `row["event"]` is the name of an `event`.
        """
        nonfinite: list[str] = []
        written: Row = {"kind": kind, "unix_seconds": round(time.time(), 3)}
        written |= {name: _plain(name, value, nonfinite) for name, value in row.items()}
        key, expected = ("event", str) if kind == "event" else ("step", int)
        if type(written.get(key)) is not expected:
            right = "a name" if kind == "event" else "a number of optimizer steps"
            problem = f"a row of kind {kind} has {key} = {row.get(key)!r}: it must be {right}"
            raise MetricsError(f"{self.path}: {problem}")
        if nonfinite:
            written["nonfinite"] = nonfinite
        self._append(written)
        return written

    def _append(self, row: Row) -> None:
        line = memoryview(_line(row))
        with naming_full_disk(self.path):
            while line:
                line = line[self._file.write(line) :]


def read_metrics(path: str | Path) -> list[Row]:
    """Return the rows of a file without its schema line and a torn last line.

    Raises:
        MetricsError: no such file, another schema, or a line in the middle that is not JSON.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise MetricsError(f"{path}: no such file of metrics") from None
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if (row := _parse(line)) is not None:
            rows.append(row)
        elif number < len(lines):
            raise MetricsError(f"{path}: line {number} is not a JSON object: {line[:80]!r}")
    _check_schema(path, rows[0] if rows else None)
    return rows[1:]


def latest_rows(path: Path, kinds: Sequence[str]) -> tuple[dict[str, Row], Row | None]:
    """Return the last whole row of each kind that is there, and the last line; None: it is torn.

    The file is read from its end, as far as they need. Raises `OSError`, and `MetricsError` for
    another schema.
    """
    rows = {}
    with path.open("rb") as file:
        _check_schema(path, _parse(file.readline(_BLOCK)))
        size = file.seek(0, os.SEEK_END)
        for kind in kinds:
            start, end = f'\n{{"kind": "{kind}", '.encode(), size
            while kind not in rows and end > 0:
                begin = max(end - _BLOCK, 0)
                file.seek(begin)
                at = file.read(end - begin + len(start) - 1).rfind(start)
                end = begin + max(at, 0)
                file.seek(end + 1)
                if at >= 0 and (row := _parse(file.readline())) is not None:
                    rows[kind] = row
        file.seek(max(size - _BLOCK, 0))
        before, _, rest = file.read().rpartition(b"\n")
    return rows, None if rest else _parse(before.rpartition(b"\n")[2])


def _check_schema(path: Path, first: Row | None) -> None:
    schema = (first or {}).get("schema")
    if schema != SCHEMA:
        raise MetricsError(f"{path}: schema {schema!r} in its first line, expected {SCHEMA!r}")


def last_rows(rows: list[Row], kind: str) -> list[Row]:
    """Return the rows of one kind by step; of several with one step, the last written."""
    by_step = {row["step"]: row for row in rows if row["kind"] == kind}
    return [by_step[step] for step in sorted(by_step)]


def mean(rows: list[Row], name: str, weight: str) -> float | None:
    """Return the mean of the rows' means, weighted by their `weight` (1 if missing)."""
    pairs = [(row[name], row.get(weight, 1)) for row in rows if row.get(name) is not None]
    total = sum(w for _, w in pairs)
    return sum(x * w for x, w in pairs) / total if total else None


def _line(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and "kind" in row
    return row if whole and (row["kind"] not in NUMBERED or "step" in row) else None


def _plain(name: str, value: Any, nonfinite: list[str]) -> Any:
    """Return `value` as JSON types; NaN and infinity become None and are named in `nonfinite`."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        nonfinite += [] if math.isfinite(value) else [name]
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(f"{name}.{key}", v, nonfinite) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}.{i}", v, nonfinite) for i, v in enumerate(value)]
    kinds = "numbers, text, lists and mappings"
    raise MetricsError(f"{name} is a {type(value).__name__}: metrics are {kinds}")


def _move_aside(path: Path, data: bytes, resume_step: int | None) -> Row | None:
    """Move dropped rows to a file of their own; return its name, their number and compute."""
    parsed = [(line, _parse(line)) for line in data.split(b"\n") if line]
    head = parsed[0][1] if parsed else None
    if head is not None and head.get("schema") != SCHEMA:
        raise MetricsError(
            f"{path}: schema {head.get('schema')!r} in its first line, this version writes"
            f" {SCHEMA!r}: choose another output_dir, or move the file"
        )
    kept, dropped, spent = [_line(SCHEMA_ROW)], list[bytes](), dict[str, float]()
    last = 0.0
    # A kept row has a step below this; events are always kept.
    end = {k: resume_step + (k != "step") for k in NUMBERED} if resume_step is not None else {}
    for line, row in parsed:
        if row is not None and row["kind"] == "schema":
            continue
        keep = row is not None and end and row.get("step", 0) < end.get(row["kind"], math.inf)
        (kept if keep else dropped).append(line + b"\n")
        if row is not None and not keep:
            spent |= {n: max(row[n], spent.get(n, 0.0)) for n in SPENT if n in row}
            last = max(last, row.get("unix_seconds", 0.0))
    if dropped:
        names = (path.with_name(f"{path.stem}.dropped-{n}.jsonl") for n in itertools.count())
        aside = next(name for name in names if not name.exists())
        replace_file(aside, b"".join([_line(SCHEMA_ROW), *dropped]))
    replace_file(path, b"".join(kept))
    if not dropped:
        return None
    return {"rows": len(dropped), "file": aside.name, "last_unix_seconds": last, **spent}
