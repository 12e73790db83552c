"""Published data sets by name: their source on the hub and the names of their fields."""

import os
import re
from dataclasses import dataclass, field
from datetime import date
from importlib import resources

import msgspec

from megatron_rl.data.question import DataError, Question
from megatron_rl.data.tables import SUFFIXES, Fields, Source, read_questions


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set on the hub. Example: `DataSet("math-ai/aime25", split="test")`."""

    source: str
    kind: str = "math"  # verifier of its rows
    fields: Fields = field(default_factory=Fields)
    split: str = "train"
    subsets: tuple[str | None, ...] = (None,)  # configurations that are read one after the other


_FILE = resources.files(__package__) / "published.yaml"
_SETS = msgspec.yaml.decode(_FILE.read_bytes(), type=dict[str, dict[str, DataSet]])
BENCHMARKS, TRAINING_SETS = _SETS["benchmarks"], _SETS["training_sets"]
"""Evaluation sets, and the data sets that `megatron-rl data prepare` knows by name."""

_DAY = r"(\d{4}-\d\d-\d\d)?"
_WITH_DATES = re.compile(rf"(.+)@{_DAY}\.\.{_DAY}")


def load_benchmark(entry: str, *, kind: str = "math") -> list[Question]:
    """Load the questions of an evaluation set, without a template.

    Example: `livecodebench@2025-01-01..2025-06-30` are the problems of half a year.

    Args:
        entry: one of `BENCHMARKS` (case and punctuation do not matter), `NAME=PATH` of its local
            copy (a file, or a folder written by `save_to_disk`), or a table: a file, a folder with
            a slash in its path, or `owner/name` on the hub. With `@FIRST..LAST` after it, the rows
            with a `contest_date` from the first to the last day; either may be left out.
        kind: verifier of a table's rows that name none.

    Raises `DataError`, with the remedy, if the name is unknown or the set cannot be loaded.
    """
    source, dates = entry, None
    if match := _WITH_DATES.fullmatch(entry):
        source, *days = match.groups()
        first, last = days[0] or "0001-01-01", days[1] or "9999-12-31"
        try:
            dates = date.fromisoformat(first), date.fromisoformat(last)
        except ValueError as e:
            raise DataError(f"evaluation set {entry!r}: {e}") from None
    name, _, local = source.partition("=")
    benchmark = BENCHMARKS.get("".join(c for c in name.lower() if c.isalnum()))
    if "/" in name or name.endswith(SUFFIXES):
        benchmark = DataSet(name, kind)
    elif benchmark is None:
        remedy = f"use one of {', '.join(BENCHMARKS)}, a file, or owner/name"
        raise DataError(f"evaluation set {entry!r} is unknown: {remedy}")
    path = os.path.expanduser(local or benchmark.source)
    table, fields = Source(path, split=benchmark.split), benchmark.fields
    return read_questions(table, kind=benchmark.kind, fields=fields, dates=dates)
