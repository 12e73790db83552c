"""Reading of evaluations: a reader per format makes a Table, and series are selected from it.

The format follows from the name: ``.csv``, ``.tsv``, ``.txt`` and ``.dat``, ``.jsonl`` (a run's
``metrics.jsonl`` as it is), ``.parquet``, TensorBoard event files or a directory of them. CSV
exported from wandb's charts has columns "run - metric". ``published:NAME`` are published points.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import PointsError
from ..options import ReadOptions
from ..series import Series
from .formats import read_csv, read_jsonl, read_parquet, read_tensorboard
from .table import Table, select

__all__ = ["ReadOptions", "Table", "read", "read_many"]

READERS = dict.fromkeys([".csv", ".tsv", ".txt", ".dat"], read_csv)
READERS |= dict.fromkeys([".jsonl", ".ndjson"], read_jsonl)
READERS |= dict.fromkeys([".parquet", ".pq"], read_parquet)


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
    series = [(Path(p), s) for p in paths for s in read(p, options)]
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
    if path.is_dir():
        problem = "the directory has no metrics.jsonl or *tfevents* file"
        raise PointsError(problem, "Name the file itself", file=str(path))
    if path.suffix.lower() not in READERS:
        remedy = "Give .csv, .tsv, .jsonl, .parquet or a TensorBoard event file; of a wandb run "
        remedy += "its metrics.jsonl, or the CSV exported from a chart"
        raise PointsError(f"unknown format '{path.suffix}'", remedy, file=str(path))
    return READERS[path.suffix.lower()](path)
