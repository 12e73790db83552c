"""A table with line numbers, and the choice of its columns: by name, else by well-known names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import DataError
from ..series import Series

COMPUTE_NAMES = (
    "compute_device_hours", "compute_gpu_hours", "gpu_hours", "device_hours", "compute_gpu_seconds",
    "gpu_seconds", "compute_flops", "flops", "compute_tokens", "tokens", "compute", "step", "_step",
    "global_step",
)  # fmt: skip
REWARD_NAMES = ("pass_rate", "reward", "accuracy", "acc", "score", "value")
SERIES_NAMES = ("series", "run", "run_name", "method")
UNITS = {
    "gpu-hours": "GPU-hours", "gpu-seconds": "GPU-seconds", "device-hours": "device-hours",
    "device-seconds": "device-seconds", "flops": "FLOPs", "tokens": "tokens", "steps": "steps",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Table:
    """Raw cells by column; None marks a cell that the file does not have."""

    source: str
    name: str
    """Name of the run if the table holds only one."""
    columns: dict[str, list[object]]
    lines: list[int]
    """Line (or record) number of each row, from 1."""
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Which columns and series to read; None means by the well-known names."""

    series: tuple[str, ...] = ()
    """Names of the series to keep; empty keeps all."""
    series_column: str | None = None
    compute_column: str | None = None
    reward_columns: tuple[str, ...] = field(default=())
    """One column; or several, each of which is a series."""
    stderr_column: str | None = None
    percent: bool | None = None
    """Whether rewards are percent; None: yes if all lie in [0, 100] and most above 1."""
    compute_unit: str | None = None
    """Unit to report: hours and seconds are converted, other names only label the column."""


def select(table: Table, options: ReadOptions) -> list[Series]:
    """Series of a table.

    Raises:
        DataError: a column or series is missing (the message lists what there is), or bad values.
    """
    compute = _find(table, options.compute_column, COMPUTE_NAMES, "compute", "--compute-column")
    wide = _wide_columns(table, options.reward_columns)
    found: list[Series] = []
    if wide:
        for name, column in wide:
            found.append(_series(table, options, name, compute, column, range(len(table.lines))))
    else:
        wanted = options.reward_columns[0] if options.reward_columns else None
        reward = _find(table, wanted, REWARD_NAMES, "reward", "--reward-column")
        for name, rows in _groups(table, options).items():
            found.append(_series(table, options, name, compute, reward, rows))
        found += _tasks(table, options, compute, reward)
    if options.series:
        names = [s.name for s in found]
        missing = [s for s in options.series if s not in names]
        if missing:
            raise DataError(
                f"no series '{missing[0]}'", f"There are: {', '.join(names)}", file=table.source
            )
        found = [s for s in found if s.name in options.series]
    return found


def _find(table: Table, wanted: str | None, known: Sequence[str], what: str, option: str) -> str:
    """Column by exact name, by last part of a path (eval/pass_rate) or by a well-known name."""
    names = list(table.columns)
    candidates = known if wanted is None else (wanted, f"compute_{wanted}")
    for candidate in candidates:
        if candidate in table.columns:
            return candidate
        ends = [n for n in names if n.replace(".", "/").rsplit("/", 1)[-1] == candidate]
        same = [n for n in names if n.lower() == candidate.lower()]
        for group in (same, ends):
            if len(group) > 1:
                # A run logs compute with its training rows too; evaluations count here.
                group = [n for n in group if n.startswith(("eval/", "eval."))] or group
            if len(group) == 1:
                return group[0]
            if len(group) > 1:
                raise DataError(
                    f"several columns could be the {what}: {', '.join(group)}",
                    f"Choose one with {option}",
                    file=table.source,
                    line=1,
                )
    looked = f"'{wanted}'" if wanted is not None else f"any of {', '.join(known)}"
    raise DataError(
        f"no {what} column ({looked})",
        f"Choose one with {option}; there are: {', '.join(names) or 'none'}",
        file=table.source,
        line=1,
        column=wanted,
    )


def _wide_columns(table: Table, wanted: tuple[str, ...]) -> list[tuple[str, str]]:
    """(series, column) of tables with one reward column per run, such as wandb's exported CSV."""
    if len(wanted) > 1:
        return [(w, _find(table, w, (), "reward", "--reward-column")) for w in wanted]
    exported = [
        n for n in table.columns if " - " in n and not n.endswith(("__MIN", "__MAX", "_step"))
    ]
    exported = [n for n in exported if not n.endswith(" - _step")]
    if wanted and wanted[0] in table.columns:
        return []
    if not wanted and any(n in table.columns for n in REWARD_NAMES):
        return []
    pairs = [(n.split(" - ", 1)[0], n.split(" - ", 1)[1], n) for n in exported]
    if wanted:
        pairs = [p for p in pairs if p[1] == wanted[0] or p[1].rsplit("/", 1)[-1] == wanted[0]]
    return [(run, column) for run, _, column in pairs]


def _groups(table: Table, options: ReadOptions) -> dict[str, list[int]]:
    """Rows of each series, in order of appearance."""
    column = options.series_column
    if column is not None and column not in table.columns:
        raise DataError(
            f"no series column '{column}'",
            f"Choose with --series-column; there are: {', '.join(table.columns)}",
            file=table.source,
            line=1,
            column=column,
        )
    if column is None:
        column = next((n for n in SERIES_NAMES if n in table.columns), None)
    if column is None:
        return {table.name: list(range(len(table.lines)))}
    groups: dict[str, list[int]] = {}
    for i, value in enumerate(table.columns[column]):
        groups.setdefault(str(value), []).append(i)
    return groups


def _tasks(table: Table, options: ReadOptions, compute: str, reward: str) -> list[Series]:
    """Per-task series of metrics.jsonl: columns tasks.<task>.<reward>."""
    found = []
    for column in table.columns:
        parts = column.split(".")
        if len(parts) >= 3 and parts[0] == "tasks" and parts[-1] == reward:
            task = ".".join(parts[1:-1])
            rows = range(len(table.lines))
            name = f"{table.name}:{task}"
            found.append(_series(table, options, name, compute, column, rows))
    return found


def _series(
    table: Table,
    options: ReadOptions,
    name: str,
    compute: str,
    reward: str,
    rows: Sequence[int],
) -> Series:
    """Numbers of one series, with what was left out or converted stated as repairs."""
    repairs = list(table.repairs)
    kept = [i for i in rows if _present(table.columns[reward][i])]
    if len(kept) < len(rows):
        repairs.append(f"{len(rows) - len(kept)} rows without {reward} left out")
    lines = [table.lines[i] for i in kept]
    c = np.array([_number(table, compute, i) for i in kept])
    r = np.array([_number(table, reward, i) for i in kept])
    stderr, stderr_name = _stderr(table, options, reward, kept, r)
    percent = options.percent
    if percent is None and len(r) and np.nanmax(r) > 1 and np.nanmedian(r) > 1:
        percent = bool(np.nanmin(r) >= 0 and np.nanmax(r) <= 100)
    if percent:
        r = r / 100
        stderr = None if stderr is None or stderr_name is None else stderr / 100
        repairs.append(f"{reward} read as percent")
    if stderr is None and (made := _binomial(table, kept, r)) is not None:
        stderr = made
        repairs.append("standard errors from the number of samples (binomial)")
    unit = unit_of(compute)
    if options.compute_unit is not None:
        c, unit, note = _convert(c, unit, options.compute_unit)
        repairs += [note] if note else []
    return Series.clean(
        c,
        r,
        stderr,
        name=name,
        unit=unit,
        source=table.source,
        lines=lines,
        columns=(compute, reward, stderr_name or "stderr"),
        repairs=repairs,
    )


def unit_of(column: str) -> str:
    """Unit of compute that a column's name tells."""
    name = column.lower()
    device = "device" if "device" in name else "GPU"
    if "hour" in name:
        return f"{device}-hours"
    if "second" in name:
        return f"{device}-seconds"
    for part, unit in (("flop", "FLOPs"), ("token", "tokens"), ("step", "steps")):
        if part in name:
            return unit
    return column


def _convert(c: np.ndarray, unit: str, wanted: str) -> tuple[np.ndarray, str, str | None]:
    target = UNITS.get(wanted.lower(), wanted)
    pair = (unit.rsplit("-", 1)[-1], target.rsplit("-", 1)[-1])
    if pair == ("seconds", "hours"):
        return c / 3600, target, f"{unit} converted to {target}"
    if pair == ("hours", "seconds"):
        return c * 3600, target, f"{unit} converted to {target}"
    known = set(UNITS.values())
    if unit in known and target in known and pair[0] != pair[1]:
        raise DataError(
            f"{unit} cannot be converted to {target}", "Choose another --compute-column"
        )
    return c, target, None


def _stderr(
    table: Table, options: ReadOptions, reward: str, rows: list[int], r: np.ndarray
) -> tuple[np.ndarray | None, str | None]:
    name = options.stderr_column
    if name is not None:
        name = _find(table, name, (), "standard error", "--stderr-column")
    else:
        name = next(
            (n for n in (f"{reward}_stderr", f"{reward}_se", "stderr") if n in table.columns), None
        )
        if name is None or not all(_present(table.columns[name][i]) for i in rows):
            return None, None
    s = np.array([_number(table, name, i) for i in rows])
    if options.stderr_column is None and np.any(s == 0):
        # A zero (all prompts right, or all wrong) is no knowledge of the noise.
        return None, None
    return s, name


def _binomial(table: Table, rows: list[int], r: np.ndarray) -> np.ndarray | None:
    """Binomial standard errors where the number of samples is given; kept off 0 by (k+1)/(n+2)."""
    if "num_samples" in table.columns:
        needed = ["num_samples"]
    elif {"num_prompts", "samples_per_prompt"} <= table.columns.keys():
        needed = ["num_prompts", "samples_per_prompt"]
    else:
        return None
    if not all(_present(table.columns[c][i]) for c in needed for i in rows):
        return None
    n = np.prod([[_number(table, c, i) for i in rows] for c in needed], axis=0)
    if np.any(n < 1) or np.any((r < 0) | (r > 1) | ~np.isfinite(r)):
        return None
    p = (r * n + 1) / (n + 2)
    return np.asarray(np.sqrt(p * (1 - p) / n))


def _present(value: object) -> bool:
    return value is not None and not (isinstance(value, str) and value.strip() == "")


def _number(table: Table, column: str, i: int) -> float:
    value = table.columns[column][i]
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str | np.number):
            raise ValueError
        text = value.strip() if isinstance(value, str) else value
        if isinstance(text, str) and text.endswith("%"):
            return float(text[:-1])
        number = float(text)
    except ValueError:
        shown = "empty" if value is None or value == "" else repr(value)
        raise DataError(
            f"not a number: {shown}",
            "Mend the cell or remove the row",
            file=table.source,
            line=table.lines[i],
            column=column,
        ) from None
    return number if math.isfinite(number) else float("nan")
