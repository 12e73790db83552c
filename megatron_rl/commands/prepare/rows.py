"""Rows of a data set with their place in it: local files and folders, saved data sets, the hub.

A row that cannot be read is no error here: it is passed on as broken, with its line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.data.question import DataError

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


@dataclass(frozen=True, slots=True)
class Row:
    """One row. Example: `Row("data/train.jsonl", 17, {"problem": "1+1", "answer": "2"})`."""

    file: str
    """File, relative to the source, or the name of a data set's part."""
    line: int
    """Line in a text file, else the number of the row, from 1."""
    values: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why the row is broken; empty if it is not."""

    @property
    def place(self) -> str:
        """`file:line`."""
        return f"{self.file}:{self.line}"


Rows = Callable[[], Iterator[Row]]
"""The rows from the start; can be called again."""


def open_rows(source: str, *, subset: str | None, split: str, revision: str | None) -> Rows:
    """The rows of a source.

    Args:
        source: file, folder, folder of `save_to_disk`, or name on the hub.
        subset: configuration on the hub; below a folder, the folder of that name, if there is one.
        split: split; below a folder, the files that begin with its name, if there are any.
        revision: commit on the hub.

    Raises:
        DataError: nothing there to be read; with the remedy.
    """
    path = Path(source)
    if path.is_file():
        return lambda: _file(path, path.name)
    if path.is_dir():
        if any((path / n).exists() for n in ("state.json", "dataset_dict.json")):
            return _table(source, lambda: _from_disk(source, split))
        files = _files(path, subset, split)
        return lambda: (row for f in files for row in _file(f, str(f.relative_to(path))))
    if path.suffix in SUFFIXES or source.startswith((".", "/")):
        raise DataError(f"{source}: no such file or folder")
    label = subset or source.rpartition("/")[2]
    return _table(label, lambda: _from_hub(source, subset, split, revision))


def _files(folder: Path, subset: str | None, split: str) -> list[Path]:
    root = folder / subset if subset and (folder / subset).is_dir() else folder
    found = sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    of_split = [p for p in found if p.name.startswith(split)]
    if not found:
        raise DataError(f"{root}: no {', '.join(SUFFIXES)} file in it")
    return of_split or found


def _file(path: Path, name: str) -> Iterator[Row]:
    match path.suffix:
        case ".jsonl":
            yield from _lines(path, name)
        case ".json":
            yield from _json(path, name)
        case ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                for values in reader:
                    yield Row(name, reader.line_num, dict(values))
        case ".parquet":
            yield from _parquet(path, name)
        case _:
            raise DataError(f"{path}: unknown file type, use one of {', '.join(SUFFIXES)}")


def _lines(path: Path, name: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield _row(name, number, raw)


def _row(name: str, number: int, raw: bytes) -> Row:
    try:
        values = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        return Row(name, number, problem=f"not JSON: {e}")
    if not isinstance(values, dict):
        kind = type(values).__name__
        return Row(name, number, problem=f"expected an object, found {kind}")
    return Row(name, number, values)


def _json(path: Path, name: str) -> Iterator[Row]:
    """A list of objects, or one object in each line."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        yield from _lines(path, name)
        return
    rows = whole if isinstance(whole, list) else [whole]
    for number, values in enumerate(rows, start=1):
        problem = "" if isinstance(values, dict) else "expected an object"
        yield Row(name, number, values if not problem else {}, problem)


def _parquet(path: Path, name: str) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as e:
        raise DataError(f"{path}: pyarrow is missing: install megatron_rl[data]") from e
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(name, number, values)
    except (pyarrow.ArrowException, OSError) as e:
        raise DataError(f"{path}: after row {number}: {e}") from e


def _table(name: str, load: Callable[[], Any]) -> Rows:
    table: list[Any] = []

    def rows() -> Iterator[Row]:
        if not table:
            table.append(load())
        for number, values in enumerate(table[0], start=1):
            yield Row(name, number, dict(values))

    return rows


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as e:
        raise DataError(
            f"{source}: the datasets library is missing: install megatron_rl[data]"
        ) from e
    return datasets


def _from_disk(source: str, split: str) -> Any:
    loaded = _datasets(source).load_from_disk(source)
    if not hasattr(loaded, "keys"):
        return loaded
    if split not in loaded:
        raise DataError(f"{source}: no split {split!r}, it has {', '.join(loaded)}")
    return loaded[split]


def _from_hub(source: str, subset: str | None, split: str, revision: str | None) -> Any:
    library = _datasets(source)
    try:
        return library.load_dataset(source, subset, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError) as e:  # what datasets raises: hub, files, names
        raise DataError(
            f"{source} (split {split}): {type(e).__name__}: {e}; without a hub give a local copy"
            " with --local"
        ) from e
