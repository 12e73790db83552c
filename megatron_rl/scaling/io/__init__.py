"""Readers: one file per format, all ending in a Table, from which series are selected by name.

The format follows from the name: ``.csv`` and ``.tsv``, ``.jsonl`` (a run's ``metrics.jsonl`` as
it is), ``.parquet``, TensorBoard event files or a directory of them, ``.wandb`` files or a
directory of an offline wandb run. CSV exported from wandb's charts has columns "run - metric".
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import DataError
from ..series import Series
from . import csvfile, jsonl, parquet, tensorboard, wandbfile
from .table import ReadOptions, Table, select

__all__ = ["ReadOptions", "Table", "read", "read_many"]


def read(path: str | Path, options: ReadOptions | None = None) -> list[Series]:
    """Read every series of a file or run directory.

    Raises:
        DataError: the file, a column or a value is not usable; names file, line and column.
        MissingExtra: the format needs a package that is not installed.
    """
    path = Path(path)
    return select(_reader(path)(path), options or ReadOptions())


def read_many(paths: Sequence[str | Path], options: ReadOptions | None = None) -> list[Series]:
    """Read several files; names that occur in more than one are prefixed by file or directory."""
    found = [(Path(p), s) for p in paths for s in read(p, options)]
    for depth in ("file", "directory"):
        names = [s.name for _, s in found]
        for i, (p, s) in enumerate(found):
            if names.count(s.name) > 1:
                prefix = p.stem if depth == "file" else p.resolve().parent.name
                found[i] = (p, replace(s, name=f"{prefix}/{s.name}"))
    return [s for _, s in found]


def _reader(path: Path) -> Callable[[Path], Table]:
    if not path.exists():
        raise DataError("no such file or directory", "Check the path", file=str(path))
    if path.is_dir():
        if (path / "metrics.jsonl").exists():
            return lambda p: jsonl.read(p / "metrics.jsonl")
        if any(path.glob("*.wandb")):
            return lambda p: wandbfile.read(next(iter(sorted(p.glob("*.wandb")))))
        if any(path.rglob("*tfevents*")):
            return tensorboard.read
        raise DataError(
            "the directory has no metrics.jsonl, *.wandb or *tfevents* file",
            "Name the file itself",
            file=str(path),
        )
    if "tfevents" in path.name:
        return tensorboard.read
    readers: dict[str, Callable[[Path], Table]] = {
        ".csv": csvfile.read,
        ".tsv": csvfile.read,
        ".jsonl": jsonl.read,
        ".ndjson": jsonl.read,
        ".parquet": parquet.read,
        ".pq": parquet.read,
        ".wandb": wandbfile.read,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"unknown format '{path.suffix}'",
            "Give .csv, .tsv, .jsonl, .parquet, a TensorBoard event file or a wandb run",
            file=str(path),
        )
    return reader
