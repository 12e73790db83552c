"""`megatron-rl runs`: a row for each run below a folder.

A row comes from the files of the run's folder, of which none is read whole if it is large. What
cannot be read is one of its `problems`, and the rest of the row is there.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from megatron_rl import run_lock
from megatron_rl.commands.alive import judge, signs_of
from megatron_rl.config import ConfigError
from megatron_rl.liveness import signs
from megatron_rl.metrics import run_report
from megatron_rl.metrics.metrics_file import MetricsError, latest_rows
from megatron_rl.metrics.terminal import visible
from megatron_rl.run_lock import last_error, last_start

app = typer.Typer()
SCHEMA = "megatron_rl.runs/1"
WIDTH = 160  # of a pipe or a file
COLUMNS = ("run", "state", "step", "pass rate", "A", "last sign", "started [UTC]", "model, recipe")
UNITS = (("d", 86_400), ("h", 3600), ("min", 60))
READ = ("run.lock", "config.yaml", "metrics.jsonl", "summary.json", "alive.json",
        run_lock.FINAL_ERROR_FILE)  # fmt: skip
MARKS = {*READ} - {"run.lock", "summary.json"}  # A folder with one of these files is a run's
INSIDE = {"checkpoints", "final", "rollouts", "start", "tensorboard", "tokens", "wandb", ""}
"""Names, up to a dot, of folders that have no runs in them."""
MOST_LEVELS = 6
PARAMETERS = 4  # of the fit


class RunOverview(msgspec.Struct, kw_only=True):
    """A run, as docs/metrics.md explains it; None is what is not known (yet)."""

    folder: str
    state: str = "unknown"
    note: str = ""  # error of a run that failed; what was seen of one that does not go on
    step: int | None = None  # optimizer steps done, of `steps`
    steps: int | None = None
    pass_rate: float | None = None
    pass_rate_step: int | None = None
    fit: dict[str, Any] | None = None  # as in summary.json, if the last start has written it
    last_sign: float | None = None  # of life; like the start, in seconds since 1970
    started: float | None = None  # last start of the ranks
    model: str | None = None
    recipe: str | None = None
    problems: list[str] = []  # files that cannot be read, and why


@app.command()
def runs(
    folder: Annotated[Path, Argument(help="Folder of runs.")] = Path("runs"),
    as_json: Annotated[bool, Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the runs below a folder, by their last sign of life: `megatron-rl runs`.

    What a run does comes from `alive.json` and `final_error.json` of its folder, the rest from
    `config.yaml`, the end of `metrics.jsonl`, and `summary.json`.
    """
    paths = find_runs(folder) if folder.is_dir() else []
    rows = sorted(map(overview, paths), key=lambda run: (-(run.last_sign or 0.0), run.folder))
    if not rows:
        kind = "no run is there" if folder.is_dir() else "no such folder"
        raise ConfigError(
            f"{folder}: {kind}: give a folder above the output_dir of a run, which has config.yaml"
            " and metrics.jsonl (`megatron-rl runs FOLDER`)"
        )
    if as_json:
        print(json.dumps({"schema": SCHEMA, "runs": [msgspec.to_builtins(run) for run in rows]}))
    else:
        print_runs(rows, folder)


def print_runs(rows: Sequence[RunOverview], folder: Path) -> None:
    """Print runs as a table, and below it the errors and the files that cannot be read."""
    table, notes, now = Table(*COLUMNS, box=SIMPLE_HEAD), list[str](), time.time()
    for run in rows:
        name = str(Path(run.folder).relative_to(folder))
        step = "" if run.step is None else f"{run.step}/{'?' if run.steps is None else run.steps}"
        rate = "" if run.pass_rate is None else f"{run.pass_rate:.3f} at {run.pass_rate_step}"
        age = "" if run.last_sign is None else f"{_age(now - run.last_sign)} ago"
        started = "" if run.started is None else time.strftime("%F %R", time.gmtime(run.started))
        model = ", ".join(filter(None, (run.model, run.recipe)))
        state = f"{run.state}, damaged" if run.problems else run.state
        cells = (name, state, step, rate, fit_text(run.fit), age, started, model)
        table.add_row(*(Text(visible(cell).replace("\n", "⏎")) for cell in cells))
        notes += [f"{name}: {text}" for text in (run.note, *run.problems) if text]
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
    for note in notes:
        console.out(visible(note))


def _age(seconds: float) -> str:
    for unit, size in UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs at or below a folder; links are not followed."""

    def warn(error: OSError) -> None:
        print(f"warning: {error}: runs below it are not listed", file=sys.stderr)

    for path, folders, files in folder.walk(on_error=warn):
        if MARKS & {*files, *folders}:
            yield path
        deep = len(path.relative_to(folder).parts) >= MOST_LEVELS
        folders[:] = [] if deep else [n for n in folders if n.partition(".")[0] not in INSIDE]


def overview(folder: Path) -> RunOverview:
    """Return the row of a run."""
    run = RunOverview(folder=str(folder))
    for path in map(folder.joinpath, READ):
        try:
            if path.exists():
                _read(run, path)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError) as e:
            text = str(e) if isinstance(e, MetricsError) else f"{path}: {type(e).__name__}: {e}"
            run.problems.append(" ".join(text.split()))
    return run


def _read(run: RunOverview, path: Path) -> None:
    """Take what a file of `READ` says, which goes before what the files before it say."""
    match path.name:
        case "run.lock":
            run.started = last_start(path.parent)
        case "config.yaml":
            # The C loader takes a tenth of the time.
            values = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            run.steps, run.model = int(values["schedule"]["steps"]), Path(values["model"]).name
            run.recipe = values["recipe"] and str(values["recipe"])
        case "metrics.jsonl":
            rows, last = latest_rows(path, ("step", "eval"))
            if last is None:
                run.problems.append(f"{path}: its last line is torn")
            run.last_sign = max((float(row["unix_seconds"]) for row in rows.values()), default=None)
            if (row := rows.get("step")) is not None:
                run.step = int(row["step"]) + 1
            if (row := rows.get("eval")) is not None:
                run.pass_rate, run.pass_rate_step = float(row["pass_rate"]), int(row["step"])
        case "summary.json" if path.stat().st_mtime >= (run.started or 0.0):  # of this start
            summary = json.loads(path.read_bytes())
            if (schema := summary["schema"]) != run_report.SCHEMA:
                raise MetricsError(f"{path}: schema {schema!r}, expected {run_report.SCHEMA!r}")
            run.state = "interrupted" if summary["run"].get("interrupted") else "ended"
            fit_text(summary["fit"])  # else it cannot be shown
            run.fit = summary["fit"]
        case "alive.json":
            _read_sign(run, path)
        case run_lock.FINAL_ERROR_FILE:
            run.state = "failed"
            run.note = last_error(path.parent) or f"{path} holds no error"


def _read_sign(run: RunOverview, path: Path) -> None:
    (sign,) = signs(path.parent, path.name).values()
    if sign is None:
        raise MetricsError(judge({path: None})[1])
    run.last_sign = max(run.last_sign or 0.0, sign.time)
    run.step = sign.step if run.step is None else run.step
    late, text = judge({path: sign} | signs_of(path.parent))
    if sign.state == "ended":
        run.state = "interrupted" if run.state == "interrupted" else "ended"
    elif sign.over() and sign.gone():
        goes_on = "its log has the cause; the same command with --resume goes on"
        run.state, run.note = "killed", f"process {sign.pid} is gone ({sign.state}): {goes_on}"
    else:
        run.state, run.note = ("overdue", text) if late else (sign.state, "")


def fit_text(fit: dict[str, Any] | None) -> str:
    """Return the asymptote of a fit with its interval, or why there is none."""
    if fit is None or "error" in fit:
        few = fit is not None and fit["points"] <= PARAMETERS
        return "too few evaluations" if few else "none" if fit else ""
    values = (fit["A"][key] for key in ("value", "low", "high"))
    return "{} [{}, {}]".format(*("?" if v is None else f"{v:.3f}" for v in values))
