"""Reading of evaluations: a reader per format makes a Table, and series are selected from it.

The format follows from the name: ``.csv``, ``.tsv``, ``.txt`` and ``.dat``, ``.jsonl`` (a run's
``metrics.jsonl`` as it is), ``.parquet``, TensorBoard event files or a directory of them, wandb's
offline runs. CSV of wandb's charts has columns "run - metric". ``published:NAME``: of the paper.
"""

import csv
import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import PointsError, require
from ..options import ReadOptions
from ..series import Series
from .table import Rows, Table, is_number, select

__all__ = ["ReadOptions", "Table", "read", "read_many"]

SCHEMA = "megatron_rl.metrics/"
MAGIC, HEADER, BLOCK, PART = b":W&B", 7, 32768, 7  # bytes; PART: of the header of a part
WHOLE, LAST = 1, 4

COMMENT = re.compile("#(?!(N/A|NUM!|DIV/0!|VALUE!))|% ")  # no cell of a spreadsheet's errors


def read(path: str | Path, options: ReadOptions | None = None) -> list[Series]:
    """Read every series of a file or run directory.

    Raises:
        PointsError: the file, a column or a value is not usable; names file, line and column.
        MissingExtra: the format needs a package that is not installed.
    """
    if str(path).startswith("published:"):
        from ..paper_points import published

        name = str(path).partition(":")[2]
        return [replace(published(name).points, name=name)]
    return select(_read_table(Path(path)), options or ReadOptions())


def read_many(paths: Sequence[str | Path], options: ReadOptions | None = None) -> list[Series]:
    """Read several files; names that occur in more than one are prefixed by file or directory."""
    # The folders of an offline run of wandb, one for each start, are read once.
    runs = {tuple(wandb_files(Path(p))) or i: Path(p) for i, p in enumerate(paths)}
    series = [(p, s) for p in runs.values() for s in read(p, options)]
    for depth in ("file", "directory"):
        names = [s.name for _, s in series]
        for i, (p, s) in enumerate(series):
            if names.count(s.name) > 1:
                prefix = p.stem if depth == "file" else p.resolve().parent.name
                series[i] = (p, replace(s, name=f"{prefix}/{s.name}"))
    return [s for _, s in series]


def _read_table(path: Path) -> Table:
    if not path.exists():
        raise PointsError("no such file or directory", "Check the path", file=str(path))
    if (path / "metrics.jsonl").exists():
        return read_jsonl(path / "metrics.jsonl")
    if "tfevents" in path.name or any(path.rglob("*tfevents*")):
        return read_tensorboard(path)
    if wandb_files(path):
        return read_wandb(path)
    if (reader := READERS.get(path.suffix.lower())) is None or path.is_dir():
        none = "the directory has no metrics.jsonl, *tfevents* or run-*.wandb file"
        problem = none if path.is_dir() else f"unknown format '{path.suffix}'"
        remedy = "Give .csv, .tsv, .jsonl, .parquet, .wandb or a TensorBoard event file"
        raise PointsError(problem, remedy, file=str(path))
    return reader(path)


def read_csv(path: Path) -> Table:
    """Read text with a header line; lines that start with # are comments.

    The delimiter is that of the header: tab, semicolon, comma or blanks. A comment above numbers is
    the header if it has as many cells, as numpy.savetxt writes it.
    """
    file, raw = str(path), path.read_bytes()
    try:
        text = raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as e:
        raise PointsError(f"not UTF-8 text ({e.reason})", "Save it as UTF-8", file=file) from None
    lines = [(n, t.strip(" ")) for n, t in enumerate(text.splitlines(), 1) if t.strip()]
    lines = [line for line in lines if not re.fullmatch("sep=.", line[1])]  # of a spreadsheet
    kept = [(n, t) for n, t in lines if not COMMENT.match(t)]
    if kept and all(map(is_number, _split(kept[0][1]))):
        kept.insert(0, _commented_header(file, lines[: lines.index(kept[0]) + 1]))
    if len(kept) < 2:
        raise PointsError("the file is empty or has no rows", "Give header and rows", file=file)
    delimiter = _delimiter(kept[0][1])
    reader = csv.reader([t for _, t in kept], delimiter=delimiter, skipinitialspace=True)
    header = [name.strip() for name in next(reader)]
    table = Table(file, path.stem, [])
    for name in header:
        if header.count(name) > 1:
            problem = f"two columns are named '{name}'"
            raise table.error(problem, "Rename one of them", name, kept[0][0])
    for row in reader:
        line = kept[reader.line_num - 1][0]
        if len(row) != len(header):
            problem = f"{len(row)} cells under {len(header)} columns"
            remedy = "Quote cells that contain the delimiter; write decimal points, not commas"
            raise table.error(problem, remedy, None, line)
        table.rows.append((line, dict(zip(header, row, strict=True))))
    return table


def _delimiter(line: str) -> str:
    """Return the delimiter of a line: of those outside quotes tab, semicolon, comma or blanks."""
    bare = re.sub(r'"[^"]*"', "", line)
    semicolon = ";" in bare and "," not in bare
    return next((d for d in ("\t", ";" if semicolon else ",", " ") if d in bare), ",")


def _split(line: str) -> list[str]:
    return re.split(r"[\s,;]+", line.strip("#% ,;\t"))


def _commented_header(file: str, lines: list[tuple[int, str]]) -> tuple[int, str]:
    """Return the last comment with as many cells as the numbers in the last of these lines."""
    *comments, (first, numbers) = lines
    delimiter, size = _delimiter(numbers), len(_split(numbers))
    for split in (lambda t: t.lstrip("#% ").rstrip(" ,;\t").split(delimiter), _split):
        for n, t in reversed(comments):
            if len(names := split(t)) == size:
                return n, delimiter.join(names)
    remedy = "Name the columns in a first line, for example gpu_hours,pass_rate"
    raise PointsError("no header line", remedy, file=file, line=first)


def read_jsonl(path: Path) -> Table:
    """Read JSON lines: a run's metrics.jsonl as it is, or a flat or nested object per line.

    Nested keys become dotted columns: ``{"tasks": {"math": {"pass_rate": 0.5}}}`` is the column
    ``tasks.math.pass_rate``. A torn last line, left by a kill, is ignored. For metrics.jsonl see
    `_evaluations`.
    """
    file, name, raw = str(path), path.stem, path.read_bytes().splitlines()
    rows: Rows = []
    repairs: list[str] = []
    for line, text in enumerate(raw, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            if line == len(raw) and rows:
                repairs.append(f"line {line} is torn and was left out")
                break
            remedy = "Correct or remove the line"
            raise PointsError(f"not JSON ({error})", remedy, file=file, line=line) from None
        if not isinstance(row, dict):
            problem = f"a {type(row).__name__}, not an object"
            raise PointsError(problem, "Write one object per line", file=file, line=line)
        rows.append((line, row))
    if not rows:
        raise PointsError("the file is empty", "Give one object per line", file=file)
    if str(rows[0][1].get("schema")).startswith(SCHEMA):
        rows = _evaluations(file, rows)
        name = path.resolve().parent.name if name == "metrics" else name
    return Table(file, name, [(line, _flatten(row)) for line, row in rows], repairs)


def _evaluations(file: str, rows: Rows) -> Rows:
    """Return the evaluations in metrics.jsonl, with the `epoch` of the last step row or 0."""
    if (schema := rows[0][1]["schema"]) != SCHEMA + "1":
        problem = f"schema {schema} is newer than {SCHEMA}1"
        raise PointsError(problem, "Update megatron_rl", file=file, line=1)
    evaluations = [(n, row) for n, row in rows if row.get("kind") in ("eval", "sets")]
    if not evaluations:
        remedy = "Switch evaluations on, or wait for the first one"
        raise PointsError("no evaluation rows (kind 'eval')", remedy, file=file)
    steps = {r["step"]: r["epoch"] for _, r in rows if r.get("kind") == "step" and "epoch" in r}
    for _, row in evaluations if steps else []:
        row["epoch"] = max((e for s, e in steps.items() if s < row.get("step", 0)), default=0)
    return evaluations


def _flatten(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        nested = isinstance(value, dict)
        flat |= _flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


def read_parquet(path: Path) -> Table:
    """Read all columns of a Parquet file; line numbers in messages are row numbers."""
    pyarrow, parquet = (require(m, f"Reading {path}", "io") for m in ("pyarrow", "pyarrow.parquet"))
    try:
        rows = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as e:
        problem = f"not a Parquet file ({e})"
        raise PointsError(problem, "Check the file's format", file=str(path)) from None
    return Table(str(path), path.stem, list(enumerate(rows, 1)))


def read_tensorboard(path: Path) -> Table:
    """Read the scalars of an event file, or of all event files of a run's directory.

    Tags become columns, aligned by step. Without a tag of compute (for example
    ``eval/compute_device_hours``, logged at the evaluation's step) the step is the compute.
    """
    module = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = require(module, f"Reading {path}", "io")
    events = accumulator.EventAccumulator(str(path), {accumulator.SCALARS: 0}).Reload()
    rows: dict[int, dict[str, object]] = {}
    for tag in events.Tags()[accumulator.SCALARS]:
        for event in events.Scalars(tag):
            rows.setdefault(event.step, {})[tag] = float(event.value)
    if not rows:
        remedy = "Name a run's own directory"
        raise PointsError("no scalars in the event files", remedy, file=str(path))
    ordered = [{"step": step, **rows[step]} for step in sorted(rows)]
    name = path.name if path.is_dir() else path.parent.name
    return Table(str(path), name, list(enumerate(ordered, 1)))


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
    """Read the rows of offline runs of wandb; the column `run` has their names.

    They are in ``wandb/offline-run-*/run-<id>.wandb``: a run that was resumed offline has a folder
    for each start, all with one id. A file has 7 bytes, then a LevelDB log in blocks of 32 KiB:
    crc32 (4 bytes), length (2) and type (1) of a part, and the part of a protobuf `Record`; wandb
    has no public reader.
    """
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


READERS = dict.fromkeys([".csv", ".tsv", ".txt", ".dat"], read_csv)
READERS |= dict.fromkeys([".jsonl", ".ndjson"], read_jsonl)
READERS |= dict.fromkeys([".parquet", ".pq"], read_parquet)
