"""`megatron-rl report`: a page about a run, or about several runs side by side."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from megatron_rl.commands.view.cli import view
from megatron_rl.config import ConfigError
from megatron_rl.files import replace_file

app = typer.Typer()
FILE = "report.html"
VIEW = "Write RUN/view.html as well, as `megatron-rl view` does, if there are rollout files."


@app.command()
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[
        Path | None,
        Option(help="File to write [RUN/report.html; of several runs report.html here]."),
    ] = None,
    with_view: Annotated[bool, Option("--view", help=VIEW)] = False,
) -> None:
    """Show a run, or several side by side: `megatron-rl report runs/demo`.

    The page needs no server and no network: open it in a browser. A run that goes on, or that was
    killed, has a page of what it has written so far. Runs are compared over the `fit.compute` of
    the first one.
    """
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: {out.parent} is no folder: make it, or name another file")
    path = out or (Path(FILE) if len(runs) > 1 else runs[0] / FILE)
    write_page(runs, path)
    print(f"open {path} in a browser: the report", flush=True)
    for run in runs if with_view else ():
        try:
            view(run)
            print(f"open {run / 'view.html'} in a browser: the completions")
        except Exception as e:  # noqa: BLE001 - the report is there; the line has the cause
            kind = "" if isinstance(e, ConfigError) else f"{type(e).__name__}: "
            print(" ".join(f"no {run / 'view.html'}: {kind}{e}".split()))


def write_page(folders: list[Path], path: Path) -> None:
    """Write the page about these runs.

    Raises:
        ConfigError: a folder is given twice, or has no readable metrics.jsonl.
    """
    from megatron_rl.commands.report.report_page import render
    from megatron_rl.commands.report.run_facts import read_run

    names = [folder.resolve().name for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder) for folder in folders]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError(f"{', '.join(names)}: one run is there twice: give each run once")
    runs = [read_run(folders[0], names[0])]
    compute = runs[0].summary["fit"]["compute"]
    runs += [read_run(*each, compute) for each in zip(folders[1:], names[1:], strict=True)]
    replace_file(path, render(runs), durable=False)
