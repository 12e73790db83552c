"""A table with line numbers, and the choice of its columns: by name, else by well-known names."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..curve import Array
from ..errors import PointsError
from ..options import ReadOptions
from ..series import Series

COMPUTE_NAMES = (
    "compute_train_device_hours", "compute_device_hours", "compute_gpu_hours", "gpu_hours",
    "device_hours", "compute_gpu_seconds", "gpu_seconds", "compute_flops", "flops",
    "compute_tokens", "tokens", "compute", "step", "_step", "global_step",
)  # fmt: skip
REWARD_NAMES = ("pass_rate", "reward", "accuracy", "acc", "score", "value")
SERIES_NAMES = ("series", "run", "run_name", "method", "name", "experiment")
STEP_NAMES = ("step", "_step", "global_step", "train_step", "iteration", "iter", "update")
LABEL = re.compile(r"(?:^|[\W_])(?:seed|id|trial|replica|repeat|rank|fold|run)$")  # may be numbers
EMPTY = {"", "none", "null", "n/a", "na", "<na>", "#n/a", "nat", "nil", "undefined", "missing"}
EMPTY |= {"-", "--", "?", "∞", "-∞", "#num!", "#div/0!", "#value!"}  # of spreadsheets
SECONDS = {"hours": 3600, "seconds": 1}
UNITS = [f"{kind}{time}" for kind in ("GPU-", "device-", "") for time in SECONDS]
UNITS += ["FLOPs", "tokens", "steps"]
EVALUATED = ("eval", "sets")  # kinds of rows of metrics.jsonl
Rows = list[tuple[int, dict[str, Any]]]  # line (or record) number from 1, and cells by column


@dataclass(frozen=True, slots=True)
class Table:
    """Raw cells; a cell that the file does not have is missing, or None."""

    source: str
    name: str  # name of the run if the table holds only one
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
        """Return the numbers of a column (PointsError: a cell is none)."""
        numbers = []
        for line, cells in rows:
            value = cells.get(column)
            text = "" if isinstance(value, bool) else str(value).strip().removesuffix("%")
            if not is_number(text):
                shown = repr(value) if has(column, [(line, cells)]) else "empty"
                remedy = "Correct the cell or remove the row"
                if re.search(r"\d[,'’\s]+\d", text):
                    remedy = "Write a decimal point, and no separator of thousands"
                raise self.error(f"not a number: {shown}", remedy, column, line)
            numbers.append(float(text))
        return np.array(numbers)


def has(column: str, rows: Rows) -> bool:
    """Return True if no cell of a column is empty, NaN or infinite in these rows."""
    texts = (str(cells.get(column)).strip().lower() for _, cells in rows)
    return all(t not in EMPTY and (not is_number(t) or math.isfinite(float(t))) for t in texts)


def is_number(text: str) -> bool:
    """Return True if float() reads a text."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _task(column: str) -> str:
    """Return the task (or set) of `tasks.<task>.<reward>` or `eval/sets/<set>/<reward>`, or ""."""
    match = re.search(r"(?:^|[./])(?:tasks|sets)[./](.+)[./][^./]+$", column)
    return match[1] if match else ""


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
        reward_name = re.split("[./]", reward)[-1]
        groups = _groups(table, options)
        above = re.escape(reward.replace(reward_name, ""))
        pattern = rf"{above}(?:tasks|sets)[./].+[./]{reward_name}"
        tasks = {f":{_task(c)}": c for c in table.columns if re.fullmatch(pattern, c)}
        columns = {"": reward, **tasks}.items()
        selection = [
            # A row of metrics.jsonl may evaluate other prompts than the column's.
            (n + end, column, [t for t in r if column in t[1] or t[1].get("kind") not in EVALUATED])
            for end, column in columns
            for n, r in groups.items()
            if not end or any(has(column, [row]) for row in r)  # runs may have other tasks
        ]
    series = [_series(table, options, n, compute, column, rows) for n, column, rows in selection]
    names = [s.name for s in series]
    for name in [n for n in options.series or () if n not in names]:
        raise PointsError(
            f"no series '{name}'", f"There are: {', '.join(names)}", file=table.source
        )
    return [s for s in series if not options.series or s.name in options.series]


def _find_column(table: Table, wanted: str | None, known: Sequence[str], purpose: str) -> str:
    """Find a column by exact name, by last part of a path (eval/pass_rate) or well-known name."""
    option, names = f"--{purpose}-column", table.columns
    for candidate in known if wanted is None else (wanted, f"compute_{wanted}"):
        exact = [n for n in names if n == candidate]
        same = [n for n in names if n.lower() == candidate.lower()]
        ends = [n for n in names if n.replace(".", "/").rsplit("/", 1)[-1] == candidate]
        ends = [n for n in ends if not _task(n)] or ends
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
    pairs: list[tuple[str, str]] = []
    extra = ("__MIN", "__MAX", "_step")
    charts = [c for c in table.columns if " - " in c and not c.endswith(extra)]
    for name in wanted or (*REWARD_NAMES, None):  # None: whatever the chart shows
        for column in charts:
            run, _, metric = column.rpartition(" - ")
            if name in (None, metric, metric.rsplit("/", 1)[-1]):
                pairs.append((f"{run}:{task}" if (task := _task(metric)) else run, column))
        if pairs:
            break
    if len({run for run, _ in pairs}) < len(pairs):
        problem = f"several columns could be the reward: {', '.join(c for _, c in pairs)}"
        raise table.error(problem, "Choose one with --reward-column", None)
    return pairs


def _groups(table: Table, options: ReadOptions) -> dict[str, Rows]:
    lower = {n.lower().replace(" ", "_"): n for n in table.columns}
    known = next((lower[n] for n in SERIES_NAMES if n in lower), None)
    if (column := options.series_column or known) is None:
        return {table.name: table.rows}
    if column not in table.columns:
        remedy = f"Choose with --series-column; there are: {', '.join(table.columns)}"
        raise table.error(f"no series column '{column}'", remedy, column)
    groups: dict[str, Rows] = {}
    for line, cells in table.rows:
        groups.setdefault(str(cells.get(column)), []).append((line, cells))
    return groups


def _series(
    table: Table, options: ReadOptions, name: str, compute: str, reward: str, rows: Rows
) -> Series:
    """Return the numbers of one series; omissions and conversions are stated as repairs."""
    repairs = list(table.repairs)
    for column in (reward, compute):
        kept = [row for row in rows if has(column, [row])]
        if len(kept) < len(rows):
            repairs.append(f"{len(rows) - len(kept)} rows without {column} left out")
        rows = kept
    _check_text(table, name, rows, compute, reward)
    rows = _last_of_each_step(table, rows, compute, repairs)
    c, r = table.numbers(compute, rows), table.numbers(reward, rows)
    stderr, stderr_name = _stderr(table, options.stderr_column, reward, rows)
    signs = {str(cells[reward]).strip().endswith("%"): line for line, cells in rows}
    if len(signs) > 1:
        problem = "only some cells have a percent sign"
        raise table.error(problem, "Write all alike", reward, max(signs.values()))
    percent = options.percent if options.percent is not None else True in signs or None
    if percent is None and len(r) and r.max() > 1 and np.median(r) > 1:
        percent = bool(r.min() >= 0 and r.max() <= 100)
    if percent:
        r = r / 100
        stderr = None if stderr is None else stderr / 100
        repairs.append(f"{reward} read as percent")
    if stderr is None and (stderr := _binomial(table, rows, r)) is not None:
        repairs.append("standard errors from the number of samples (binomial)")
    c, unit = _convert(c, _unit(compute), options, repairs)
    epoch = table.numbers("epoch", rows) if rows and has("epoch", rows) else None
    origin: dict[str, Any] = {"source": table.source, "lines": [line for line, _ in rows]}
    origin["columns"] = (compute, reward, stderr_name or "stderr")
    return Series.clean(c, r, stderr, epoch=epoch, name=name, unit=unit, repairs=repairs, **origin)


def _check_text(table: Table, name: str, rows: Rows, compute: str, reward: str) -> None:
    """Raise PointsError if a column of text (or seeds) splits the rows into overlapping runs."""
    for column in table.columns:
        kept = [row for row in rows if has(column, [row])]
        values = [str(cells[column]).strip() for _, cells in kept]
        numbers = not LABEL.search(column.lower()) and all(map(is_number, values))
        if column in (compute, reward) or numbers:
            continue
        at = table.numbers(compute, kept)
        spans = [(at[[v == w for w in values]], v) for v in dict.fromkeys(values)]
        spans = [span for span in spans if len(span[0]) > 1]
        spans.sort(key=lambda span: float(span[0].min()))
        for (one, first), (two, second) in pairwise(spans):
            if two.min() < one.max():
                problem = f"series '{name}' mixes rows of {first} and {second}, perhaps runs"
                remedy = f"For a series each give --series-column '{column}', else remove it"
                raise table.error(problem, remedy, column)


def _last_of_each_step(table: Table, rows: Rows, compute: str, repairs: list[str]) -> Rows:
    """Return the last row of each step (a resumed run repeats some), or else of each compute."""
    names = [n for n in table.columns if re.split("[./]", n.lower())[-1] in STEP_NAMES]
    names.sort(key=lambda n: n.startswith("_"))  # wandb's own step counts calls, and last
    step = next((n for n in names if has(n, rows)), compute)
    numbers, at = table.numbers(step, rows), table.numbers(compute, rows)
    last: dict[float, int] = {}
    back: list[int] = []
    for i, n in enumerate(numbers.tolist()):
        if n in last:
            before = max((at[k] for m, k in last.items() if m < n), default=np.nan)
            # A counter that was saved comes to about the same again, one that starts at 0 does not.
            if at[last[n]] > before >= at[i] - (at[last[n]] - before) / 4:
                back.append(i)
        last[n] = i
    if len(last) < len(rows):
        note = f"{len(rows) - len(last)} evaluations at a repeated {step}, as after a resume: "
        repairs.append(note + "the last counts")
    order = [*last.values()] if step == compute else [last[n] for n in sorted(last)]
    back += [i for before, i in pairwise(order) if at[i] < at[before]]
    if back and step != compute:
        line, cells = rows[back[0]]
        problem = f"compute goes back to {cells[compute]} at {step} {cells[step]}"
        remedy = "Does it start again after a resume? Then add the compute before it"
        raise table.error(problem, remedy, compute, line)
    return [rows[i] for i in order]


def _unit(column: str) -> str:
    name = column.lower()
    kind = "device-" if "device" in name else "GPU-" if "gpu" in name else ""
    units = (f"{kind}hours", f"{kind}seconds", "FLOPs", "tokens", "steps")
    return next((u for u in units if u.split("-")[-1].lower()[:-1] in name), column)


def _convert(c: Array, unit: str, options: ReadOptions, notes: list[str]) -> tuple[Array, str]:
    """Convert compute to the wanted unit; labels that are no known units change nothing."""
    if options.devices is not None:
        if unit not in SECONDS or options.devices <= 0:
            problem = f"{options.devices:g} devices cannot multiply compute in {unit}"
            raise PointsError(problem, "--devices is for hours or seconds of a clock")
        notes.append(f"{unit} of {options.devices:g} devices read as GPU-{unit}")
        c, unit = c * options.devices, f"GPU-{unit}"
    wanted = options.compute_unit or unit
    target = next((u for u in UNITS if u.lower() == wanted.lower()), wanted)
    (kind, _, time), (new_kind, _, new_time) = unit.rpartition("-"), target.rpartition("-")
    if unit != target and {time, new_time} <= {*SECONDS} and bool(kind) == bool(new_kind):
        notes.append(f"{unit} converted to {target}")
        return c * (SECONDS[time] / SECONDS[new_time]), target
    if unit != target and {unit, target} <= {*UNITS}:
        remedy = "Choose another --compute-column, or give --devices for hours of a clock"
        raise PointsError(f"{unit} cannot be converted to {target}", remedy)
    return c, target


def _stderr(
    table: Table, wanted: str | None, reward: str, rows: Rows
) -> tuple[Array | None, str | None]:
    """Return the standard errors and their column, if all rows have one."""
    if wanted is not None:
        name = _find_column(table, wanted, (), "stderr")
        return table.numbers(name, rows), name
    names = [n for n in (f"{reward}_stderr", f"{reward}_se", "stderr") if n in table.columns]
    # A zero (all prompts right, or all wrong) does not give the noise.
    if names and has(names[0], rows) and np.all(s := table.numbers(names[0], rows)):
        return s, names[0]
    return None, None


def _binomial(table: Table, rows: Rows, r: Array) -> Array | None:
    """Return binomial standard errors if the number of samples is known; (k+1)/(n+2) is not 0."""
    needed = ["num_samples"]
    if needed[0] not in table.columns:
        needed = ["num_prompts", "samples_per_prompt"]
    if not all(has(column, rows) for column in needed):
        return None
    n = np.prod([table.numbers(column, rows) for column in needed], axis=0)
    if np.any(n < 1) or np.any((r < 0) | (r > 1)):
        return None
    p = (r * n + 1) / (n + 2)
    return np.asarray(np.sqrt(p * (1 - p) / n))
