"""Rollout files: the completions of a run, one row each, as Parquet in `<output_dir>/rollouts`.

    step_000123.parquet   completions of the groups in the batches of step 123, also skipped ones
    eval_000123.parquet   evaluations of weight version 123; `set` names the evaluation set

A step is written when it is trained, or when the run ends before that. A file is complete or not
there.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_rl.files import left_in, naming_full_disk, sibling
from megatron_rl.metrics.metrics_file import MetricsError, Row

SCHEMA = "megatron_rl.rollouts/3"
_READ = (SCHEMA, "megatron_rl.rollouts/2", "megatron_rl.rollouts/1")
"""The older ones have `forced_start` and `forced_end` for `origins`; the first no ratios."""
_TABLE = (resources.files(__package__) / "rollouts.yaml").read_text()
COLUMNS: dict[str, list[str]] = yaml.safe_load(_TABLE)  # column -> [type, meaning]
BYTES_PER_TOKEN = 12  # of disk, rounded up: docs/metrics.md has what was measured
Decode = Callable[[list[int]], str]
RUNS = ("versions", "origins")  # of which rows have pairs of value and number of tokens
MAX_PENDING = 2  # files; then the next batch waits
CLOSE_SECONDS = 600.0
_ROWS, _TOKENS = 256, 2**20  # most of a row group: between two of them the event loop goes on


class RolloutWriter:
    """Writes rollout files in a thread; one writer per folder (`run_lock`).

    Files of another run, or from the checkpoint of `resume_step` updates on, are moved to
    `<folder>.dropped-<n>`. When the files of steps are over `max_bytes`, the oldest are removed;
    the newest stays. `decode` gives the text of token ids.
    """

    def __init__(
        self, folder: Path, max_bytes: float, decode: Decode, resume_step: int | None = None
    ) -> None:
        self.folder, self._max_bytes, self._decode = folder, max_bytes, decode
        for path in left_in(folder):
            path.unlink(missing_ok=True)
        again = {} if resume_step is None else {"step": resume_step, "eval": resume_step + 1}
        names = (folder.with_name(f"{folder.name}.dropped-{n}") for n in itertools.count())
        aside = next(name for name in names if not name.exists())
        for kind, step, path in _files(folder):
            if step >= again.get(kind, 0):
                aside.mkdir(exist_ok=True)
                path.rename(aside / path.name)
        steps = sorted((n, path) for kind, n, path in _files(folder) if kind == "step")
        self._sizes = {path: path.stat().st_size for _, path in steps}  # the oldest first
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._pending: list[Future[None]] = []

    def write(self, kind: str, step: int, rows: list[Row]) -> None:
        """Write a file soon; an evaluation is added to the other sets of its version.

        Tokens of rows are little-endian bytes, `versions` and `origins` pairs of value and number
        of tokens. The `completion` of a row is decoded, unless it has one.
        """
        self._pending.append(self._thread.submit(self._write, kind, step, rows))

    def check(self) -> int:
        """Return the number of files to write; raise the error of one that was not written."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()
        return len(self._pending)

    def close(self) -> None:
        """Wait until all files are complete; raise the error of one that was not written."""
        wait(self._pending, CLOSE_SECONDS)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.check()
        if self._pending:
            raise TimeoutError(f"{self.folder}: the disk is too slow for the last files")

    def _write(self, kind: str, step: int, rows: list[Row]) -> None:
        from pyarrow import parquet

        path = self.folder / f"{kind}_{step:06d}.parquet"
        self.folder.mkdir(parents=True, exist_ok=True)
        work = sibling(path, "tmp")
        # Dictionaries and statistics of tokens cost time and save nothing; split bytes save some.
        text = [name for name, (type_, _) in COLUMNS.items() if type_ == "string"]
        split = [f"{n}.list.element" for n, (kind, _) in COLUMNS.items() if kind == "list float"]
        options = {"compression": "zstd", "use_dictionary": text, "write_statistics": False}
        options["column_encoding"] = dict.fromkeys(split, "BYTE_STREAM_SPLIT")
        try:
            with naming_full_disk(path), work.open("wb") as file:
                with parquet.ParquetWriter(file, arrow_schema(), **options) as writer:
                    for batch in self._batches(path, kind, rows):
                        writer.write_batch(batch)
                file.flush()
                os.fsync(file.fileno())
            work.replace(path)
        finally:
            work.unlink(missing_ok=True)
        if kind == "step":
            self._sizes[path] = path.stat().st_size
        while sum(self._sizes.values()) > self._max_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            oldest.unlink(missing_ok=True)
            del self._sizes[oldest]

    def _batches(self, path: Path, kind: str, rows: list[Row]) -> Iterator[Any]:
        longest = max((len(row["token_ids"]) // 4 for row in rows), default=0)
        size = min(_ROWS, max(1, _TOKENS // max(1, longest)))
        if kind == "eval" and path.exists():
            table, new = read_rollouts(path), {row["set"] for row in rows}
            keep = [name not in new for name in table["set"].to_pylist()]
            yield from table.filter(keep).to_batches(size)
        for some in itertools.batched(rows, size):
            yield record_batch([r if "completion" in r else self._decoded(r) for r in some])

    def _decoded(self, row: Row) -> Row:
        ids = np.frombuffer(row["token_ids"], "<i4").tolist()
        return row | {"completion": self._decode(ids)}


def steps_of(text: str) -> tuple[int, int]:
    """Return the first and the last step of `3-7`, or of `3` alone.

    Raises:
        ValueError: it is neither.
    """
    given = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if given is None or int(given[2] or given[1]) < int(given[1]):
        raise ValueError(f"--steps {text}: write the first and the last step as 3-7")
    return int(given[1]), int(given[2] or given[1])


def read_rollouts(path: str | Path, columns: Sequence[str] | None = None) -> Any:
    """Return the `pyarrow.Table` of a rollout file, or of all files of a folder.

    Columns that an older file does not have are null.

    Raises:
        MetricsError: a file has another schema.
    """
    import pyarrow
    from pyarrow import parquet

    path, tables, schema = Path(path), [], arrow_schema()
    names = list(COLUMNS) if columns is None else columns
    wanted = pyarrow.schema([schema.field(name) for name in names], schema.metadata)
    for one in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        with parquet.ParquetFile(one) as file:
            name = (file.schema_arrow.metadata or {}).get(b"schema", b"none").decode()
            if name not in _READ:
                raise MetricsError(f"{one}: schema {name!r}, expected {SCHEMA!r}")
            older = name != SCHEMA and "origins" in names
            given = file.read(
                [*names, "token_ids", "forced_start", "forced_end"] if older else names
            )
        nulls = {f.name: pyarrow.nulls(len(given), f.type) for f in wanted}
        arrays = nulls | dict(zip(given.column_names, given.columns, strict=True))
        if older:
            arrays["origins"] = pyarrow.array(_forced_origins(given), schema.field("origins").type)
        tables.append(pyarrow.table([arrays[name] for name in names], schema=wanted))
    return pyarrow.concat_tables(tables or [wanted.empty_table()])


def _forced_origins(table: Any) -> list[list[int]]:
    """Return the origins of a file of single turns: the tokens of one range were forced."""
    columns = table["forced_start"].to_pylist(), table["forced_end"].to_pylist()
    lengths = [len(ids) for ids in table["token_ids"]]
    return [
        [0] * start + [1] * (end - start) + [0] * (length - end)
        for start, end, length in zip(*columns, lengths, strict=True)
    ]


@cache
def arrow_schema() -> Any:
    """Return the `pyarrow.Schema` of the files."""
    import pyarrow

    fields = []
    for name, (kind, doc) in COLUMNS.items():
        item = pyarrow.type_for_alias(kind.removeprefix("list "))
        type_ = pyarrow.list_(item) if kind.startswith("list ") else item
        fields.append(pyarrow.field(name, type_, metadata={"doc": doc}))
    return pyarrow.schema(fields, metadata={"schema": SCHEMA})


def record_batch(rows: Sequence[Row]) -> Any:
    """Return the `pyarrow.RecordBatch` of some rows, without a Python object per token."""
    import pyarrow

    arrays, schema = [], arrow_schema()
    for field in schema:
        values: list[Any] = [row.get(field.name) for row in rows]
        if field.name in RUNS:
            values = [np.repeat(*np.array(v, "<i4").reshape(-1, 2).T).tobytes() for v in values]
        if pyarrow.types.is_list(field.type):
            null = np.array([v is None for v in values])
            values = [v or b"" for v in values]
            offsets = np.cumsum([0, *(len(v) // 4 for v in values)], dtype=np.int32)
            buffers = [None, pyarrow.py_buffer(b"".join(values))]
            tokens = pyarrow.Array.from_buffers(field.type.value_type, int(offsets[-1]), buffers)
            lists = pyarrow.ListArray.from_arrays(offsets, tokens, mask=pyarrow.array(null))
            arrays.append(lists)
        else:
            if pyarrow.types.is_string(field.type):  # half of a surrogate pair is no character
                values = [v if v is None else v.encode("utf-8", "backslashreplace") for v in values]
            arrays.append(pyarrow.array(values, type=field.type))
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _files(folder: Path) -> Iterator[tuple[str, int, Path]]:
    for path in list(folder.glob("*.parquet")):
        if name := re.fullmatch(r"(step|eval)_(\d+)\.parquet", path.name):
            yield name[1], int(name[2]), path
