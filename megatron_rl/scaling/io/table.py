"""A table with line numbers, and the choice of its columns: by name, else by well-known names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..curve import Array
from ..errors import PointsError
from ..options import ReadOptions
from ..series import Series

COMPUTE_NAMES = (
    "compute_device_hours", "compute_gpu_hours", "gpu_hours", "device_hours", "compute_gpu_seconds",
    "gpu_seconds", "compute_flops", "flops", "compute_tokens", "tokens", "compute", "step", "_step",
    "global_step",
)  # fmt: skip
REWARD_NAMES = ("pass_rate", "reward", "accuracy", "acc", "score", "value")
SERIES_NAMES = ("series", "run", "run_name", "method")
UNITS = ["GPU-hours", "GPU-seconds", "device-hours", "device-seconds", "FLOPs", "tokens", "steps"]
Rows = list[tuple[int, dict[str, Any]]]
"""Line (or record) number from 1, and cells by column."""


@dataclass(frozen=True, slots=True)
class Table:
    """Raw cells; a cell that the file does not have is missing, or None."""

    source: str
    name: str
    """Name of the run if the table holds only one."""
    rows: Rows
    repairs: Sequence[str] = ()

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in order of appearance."""
        return list(dict.fromkeys(name for _, cells in self.rows for name in cells))

    def error(self, problem: str, remedy: str, column: str | None, line: int = 1) -> PointsError:
        """Return the error of a cell, or of the header."""
        return PointsError(problem, remedy, file=self.source, line=line, column=column)

    def numbers(self, column: str, rows: Rows) -> Array:
        """Return the numbers of a column (PointsError: a cell is none); infinite ones are nan."""
        return np.array([self._number(column, *row) for row in rows], dtype=float)

    def _number(self, column: str, line: int, cells: dict[str, Any]) -> float:
        value = cells.get(column)
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str | np.number):
                raise ValueError
            number = float(value.strip().removesuffix("%") if isinstance(value, str) else value)
        except ValueError:
            shown = repr(value) if has(column, [(line, cells)]) else "empty"
            remedy = "Correct the cell or remove the row"
            raise self.error(f"not a number: {shown}", remedy, column, line) from None
        return number if math.isfinite(number) else float("nan")


def has(column: str, rows: Rows) -> bool:
    """Return True if no cell of a column is empty in these rows."""
    values = (cells.get(column) for _, cells in rows)
    return not any(v is None or (isinstance(v, str) and not v.strip()) for v in values)


def select(table: Table, options: ReadOptions) -> list[Series]:
    """Return the series of a table.

    Raises:
        PointsError: a column or series is missing (the message lists the others), or bad values.
    """
    compute = _find_column(table, options.compute_column, COMPUTE_NAMES, "compute")
    selection = [(name, column, table.rows) for name, column in _wide_columns(table, options)]
    if not selection:
        wanted = options.reward_column[0] if options.reward_column else None
        reward = _find_column(table, wanted, REWARD_NAMES, "reward")
        selection = [(name, reward, rows) for name, rows in _groups(table, options).items()]
        for column in table.columns:  # metrics.jsonl has columns tasks.<task>.<reward>
            parts = column.split(".")
            if len(parts) >= 3 and parts[0] == "tasks" and parts[-1] == reward:
                selection.append((f"{table.name}:{'.'.join(parts[1:-1])}", column, table.rows))
    series = [_series(table, options, n, compute, column, rows) for n, column, rows in selection]
    names = [s.name for s in series]
    for name in options.series or ():
        if name not in names:
            others = f"There are: {', '.join(names)}"
            raise PointsError(f"no series '{name}'", others, file=table.source)
    return [s for s in series if not options.series or s.name in options.series]


def _find_column(table: Table, wanted: str | None, known: Sequence[str], purpose: str) -> str:
    """Find a column by exact name, by last part of a path (eval/pass_rate) or well-known name."""
    option, names = f"--{purpose}-column", table.columns
    for candidate in known if wanted is None else (wanted, f"compute_{wanted}"):
        exact = [n for n in names if n == candidate]
        same = [n for n in names if n.lower() == candidate.lower()]
        ends = [n for n in names if n.replace(".", "/").rsplit("/", 1)[-1] == candidate]
        for group in (exact, same, ends):
            if len(group) > 1:
                # A run logs compute with its training rows too; evaluations count here.
                group = [n for n in group if n.startswith(("eval/", "eval."))] or group
            if len(group) == 1:
                return group[0]
            if len(group) > 1:
                problem = f"several columns could be the {purpose}: {', '.join(group)}"
                raise table.error(problem, f"Choose one with {option}", None)
    looked = f"any of {', '.join(known)}" if wanted is None else f"'{wanted}'"
    remedy = f"Choose one with {option}; there are: {', '.join(names) or 'none'}"
    raise table.error(f"no {purpose} column ({looked})", remedy, wanted)


def _wide_columns(table: Table, options: ReadOptions) -> list[tuple[str, str]]:
    """Return (series, column) of reward columns per run: by option, or wandb's "run - metric"."""
    wanted = options.reward_column or []
    if len(wanted) > 1:
        return [(w, _find_column(table, w, (), "reward")) for w in wanted]
    if any(name in table.columns for name in wanted or REWARD_NAMES):
        return []
    pairs = []
    for column in table.columns:
        run, separator, metric = column.partition(" - ")
        extra = column.endswith(("__MIN", "__MAX", "_step"))
        match = not wanted or wanted[0] in (metric, metric.rsplit("/", 1)[-1])
        if separator and match and not extra:
            pairs.append((run, column))
    return pairs


def _groups(table: Table, options: ReadOptions) -> dict[str, Rows]:
    """Return the rows of each series, in order of appearance."""
    column = options.series_column
    if column is not None and column not in table.columns:
        remedy = f"Choose with --series-column; there are: {', '.join(table.columns)}"
        raise table.error(f"no series column '{column}'", remedy, column)
    if column is None:
        column = next((n for n in SERIES_NAMES if n in table.columns), None)
    if column is None:
        return {table.name: table.rows}
    groups: dict[str, Rows] = {}
    for line, cells in table.rows:
        groups.setdefault(str(cells.get(column)), []).append((line, cells))
    return groups


def _series(
    table: Table, options: ReadOptions, name: str, compute: str, reward: str, rows: Rows
) -> Series:
    """Return the numbers of one series; omissions and conversions are stated as repairs."""
    repairs = list(table.repairs)
    kept = [row for row in rows if has(reward, [row])]
    if len(kept) < len(rows):
        repairs.append(f"{len(rows) - len(kept)} rows without {reward} left out")
    c, r = table.numbers(compute, kept), table.numbers(reward, kept)
    stderr, stderr_name = _stderr(table, options.stderr_column, reward, kept)
    percent = options.percent
    if percent is None and len(r) and np.nanmax(r) > 1 and np.nanmedian(r) > 1:
        percent = bool(np.nanmin(r) >= 0 and np.nanmax(r) <= 100)
    if percent:
        r = r / 100
        stderr = None if stderr is None else stderr / 100
        repairs.append(f"{reward} read as percent")
    if stderr is None and (stderr := _binomial(table, kept, r)) is not None:
        repairs.append("standard errors from the number of samples (binomial)")
    unit = _unit(compute)
    if options.compute_unit is not None:
        wanted = options.compute_unit
        target = next((u for u in UNITS if u.lower() == wanted.lower()), wanted)
        converted = _convert(c, unit, target)
        if converted is not c:
            repairs.append(f"{unit} converted to {target}")
        c, unit = converted, target
    origin: dict[str, Any] = {"source": table.source, "lines": [line for line, _ in kept]}
    origin["columns"] = (compute, reward, stderr_name or "stderr")
    return Series.clean(c, r, stderr, name=name, unit=unit, repairs=repairs, **origin)


def _unit(column: str) -> str:
    name = column.lower()
    device = "device" if "device" in name else "GPU"
    units = (f"{device}-hours", f"{device}-seconds", "FLOPs", "tokens", "steps")
    parts = ("hour", "second", "flop", "token", "step")
    return next((unit for part, unit in zip(parts, units, strict=True) if part in name), column)


def _convert(c: Array, unit: str, target: str) -> Array:
    """Convert compute between seconds and hours; labels that are no known units change nothing."""
    old, new = unit.rsplit("-", 1)[-1], target.rsplit("-", 1)[-1]
    if (old, new) == ("seconds", "hours"):
        return c / 3600
    if (old, new) == ("hours", "seconds"):
        return c * 3600
    if {unit, target} <= set(UNITS) and old != new:
        problem = f"{unit} cannot be converted to {target}"
        raise PointsError(problem, "Choose another --compute-column")
    return c


def _stderr(
    table: Table, wanted: str | None, reward: str, rows: Rows
) -> tuple[Array | None, str | None]:
    """Return the standard errors and their column, if all rows have one."""
    if wanted is not None:
        name = _find_column(table, wanted, (), "stderr")
        return table.numbers(name, rows), name
    names = [n for n in (f"{reward}_stderr", f"{reward}_se", "stderr") if n in table.columns]
    if not names or not has(names[0], rows):
        return None, None
    s = table.numbers(names[0], rows)
    # A zero (all prompts right, or all wrong) does not give the noise.
    return (None, None) if np.any(s == 0) else (s, names[0])


def _binomial(table: Table, rows: Rows, r: Array) -> Array | None:
    """Return binomial standard errors if the number of samples is known; (k+1)/(n+2) is not 0."""
    needed = ["num_prompts", "samples_per_prompt"]
    if "num_samples" in table.columns:
        needed = ["num_samples"]
    if not all(has(column, rows) for column in needed):
        return None
    n = np.prod([table.numbers(column, rows) for column in needed], axis=0)
    if np.any(n < 1) or np.any((r < 0) | (r > 1) | ~np.isfinite(r)):
        return None
    p = (r * n + 1) / (n + 2)
    return np.asarray(np.sqrt(p * (1 - p) / n))
