"""`megatron-rl view`: the completions of a run on one page, or in the terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from megatron_rl.config import ConfigError
from megatron_rl.files import replace_file
from megatron_rl.liveness import signs
from megatron_rl.metrics.metrics_file import MetricsError
from megatron_rl.metrics.rollouts import arrow_schema, read_rollouts, steps_of
from megatron_rl.metrics.run_report import is_reported
from megatron_rl.metrics.terminal import visible

app = typer.Typer()
CLIPPED = 40  # characters of a cell
LOOK_SECONDS = 5.0  # between looks
MOST_BYTES = 400 * 2**20  # of rollout files: more is no page for a browser
SHOWN = ("step", "kind", "task", "prompt_id", "group", "index", "reward", "verdict", "tokens",
         "lag_max", "engine", "trained")  # fmt: skip
STEPS = "First and last step, as 3-7: evaluations by their weight version [all]."
TEXT = "Print the table and one completion instead of a page."
FOLLOW = "Write the page again when there are new files, until the run has ended."


@app.command()
def view(
    run: Annotated[Path, Argument(help="Folder of a run, its output_dir.")],
    out: Annotated[Path | None, Option(help="File to write [RUN/view.html].")] = None,
    steps: Annotated[str | None, Option(help=STEPS)] = None,
    text: Annotated[bool, Option("--text", help=TEXT)] = False,
    row: Annotated[int, Option(min=0, help="Row that --text prints in full.")] = 0,
    follow: Annotated[bool, Option("--follow", help=FOLLOW)] = False,
) -> None:
    """Show the completions of a run: `megatron-rl view runs/demo` writes runs/demo/view.html.

    The page needs no server and no network: open it by a double click.
    """
    if text and (follow or out is not None):
        raise ConfigError("--text prints once: leave --follow and --out out")
    path, folder, files = out or run / "view.html", run / "rollouts", list[Path]()
    for files, state in _looks(folder, steps, follow):
        try:
            if files and text:
                print_rows(_read(files), row)
            elif files:
                replace_file(path, _page(run, files, state), durable=False)
                print(f"{path}: {len(files):,} files; {state}", flush=True)
        except MetricsError as e:
            raise ConfigError(f"{e}: this version of the package does not read it") from None
    if not files:
        if any(folder.glob("*.parquet")):
            raise ConfigError(f"--steps {steps}: {folder} has no file of these steps")
        remedy = "RUN must be the output_dir of a run with metrics.rollouts_every_steps above 0"
        raise ConfigError(f"{folder}: no rollout files are there: {remedy}")


def _page(run: Path, files: list[Path], state: str) -> str:
    from megatron_rl.commands.view.page import encode, render, run_tokenizer

    state += time.strftime("; written %F %H:%M UTC", time.gmtime())
    return render(*encode(_read(files), run_tokenizer(run)), {"title": str(run), "state": state})


def print_rows(table: Any, row: int) -> None:
    """Print rows of rollout files as a table, and a prompt with its completion."""
    import pyarrow.compute as pc
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if row >= table.num_rows:
        raise ConfigError(f"--row {row}: the rows are 0 to {table.num_rows - 1}")
    table = table.append_column("tokens", pc.list_value_length(table["token_ids"]))
    lines = Table("row", *SHOWN, box=SIMPLE_HEAD)
    for number, values in enumerate(zip(*(table[n].to_pylist() for n in SHOWN), strict=True)):
        cells = ["" if v is None else visible(str(v)).replace("\n", "⏎") for v in values]
        lines.add_row(str(number), *(Text(c[:CLIPPED]) for c in cells))
    console = Console(highlight=False)
    if not console.is_terminal:  # a pipe or a file has no width
        console.width = CLIPPED * len(SHOWN)
    console.print(lines)
    for name in ("prompt", "completion", "verdict_reason", "dropped_because"):
        # Whole lines: the terminal wraps one of 200 kB faster.
        console.out(f"{name} of row {row}\n{visible(table[name][row].as_py() or '')}\n")


def run_state(run: Path) -> str:
    """Return the state of a run by the sign of its trainer rank 0; "" while it goes on."""
    (sign,) = signs(run, "alive.json").values() or (None,)
    if sign is None:
        return "no run signs in this folder"
    # One that starts again has not written a row yet.
    begins = sign.state in ("starting", "loading")
    if sign.state == "ended" or (is_reported(run) and not begins):
        return f"the run has ended at step {sign.step}"
    if sign.over():
        return f"the run has stopped at step {sign.step}: `megatron-rl alive` says more"
    return ""


def _looks(folder: Path, steps: str | None, follow: bool) -> Iterator[tuple[list[Path], str]]:
    """Yield the files and the state of the run when the files are others, until it has ended."""
    try:
        first, last = steps_of(steps) if steps else (0, sys.maxsize)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    before: dict[Path, int] = {}
    while True:
        # First the state: files that come before the end of the run are in the last look.
        state, files = run_state(folder.parent), {}
        for path in sorted(folder.glob("*_*.parquet")):
            number = path.stem.rpartition("_")[2]
            if number.isdecimal() and first <= int(number) <= last:
                with suppress(FileNotFoundError):  # a living run removes the oldest
                    files[path] = path.stat().st_mtime_ns
        if files != before or state or not follow:
            yield list(files), state or "the run goes on"
        if state or not follow:
            return
        before = files
        time.sleep(LOOK_SECONDS)


def _read(files: list[Path]) -> Any:
    import pyarrow

    tables, size = [arrow_schema().empty_table()], 0
    for path in files:
        with suppress(FileNotFoundError):
            size += path.stat().st_size
            if size > MOST_BYTES:
                raise ConfigError(f"over {MOST_BYTES >> 20} MiB of files: take a part: --steps A-B")
            tables.append(read_rollouts(path))
    order = ("kind", "step", "set", "group", "index")
    return pyarrow.concat_tables(tables).sort_by([(name, "ascending") for name in order])
