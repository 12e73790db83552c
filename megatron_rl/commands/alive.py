"""`megatron-rl alive`, a probe: it imports little, so that it takes a fraction of a second."""

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from megatron_rl.liveness import BOUNDS, FOLDER, Sign, node_folder, run_prefix, signs

RUN = "Folder of a run [all runs on this node]; on other nodes than its own, rank 0 counts."
IDLE = "Exit status 0 if no run has signed here (an image without a run is healthy)."


def alive(
    run_dir: Annotated[Path | None, Argument(help=RUN)] = None,
    idle_ok: Annotated[bool, Option("--idle-ok", help=IDLE)] = False,
) -> None:
    """Tell whether the ranks of this node's run make progress, or have ended well.

    Exit status 1: one line says what stopped when, and what to look at. The time that a rank may
    take follows from the `timeouts` of its run; torchrun has as long to restart one.
    """
    folder = node_folder()
    files = signs(folder) if run_dir is None else signs_of(run_dir)
    status, text = int(not idle_ok), f"no run has signed in {folder} ({FOLDER} names another)"
    if files:
        status, text = judge(files)
    print(text)
    raise typer.Exit(status)


def signs_of(run: Path) -> dict[Path, Sign | None]:
    """Return the signs of a run's ranks on this node, else that of rank 0, by file."""
    run = run.resolve()
    return signs(node_folder(), f"{run_prefix(run)}*.json") or signs(run, "alive.json")


def judge(files: Mapping[Path, Sign | None]) -> tuple[int, str]:
    """Return exit status and text for signs by file; None is a file that holds none."""
    for path, sign in files.items():
        if sign is None:
            return 1, f"{path} holds no sign: a living rank will replace it; else remove it"
    by_time = sorted(filter(None, files.values()), key=lambda sign: sign.time)
    # What ended or was killed counts only where no run lives.
    runs = {sign.run for sign in by_time if sign.process()} or {by_time[-1].run}
    newest = {}
    for sign in by_time:
        if sign.run in runs:
            newest[sign.run] = line = (
                f"{sign.run}: {sign.role} rank {sign.rank}: {sign.state} at step {sign.step},"
                f" {time.time() - sign.time:.0f} s ago"
            )
            if sign.late():
                return 1, line + _remedy(sign)
    return 0, "\n".join(newest.values())


def _remedy(sign: Sign) -> str:
    state, look = f"on {sign.host}", "its log"
    if sign.host == socket.gethostname():
        state = {"": "gone", "T": "stopped by a signal"}.get(sign.process(), "hangs")
        look += f" and `py-spy dump --pid {sign.pid}`" if sign.process() else " and the kernel's"
    bounds = " + ".join(f"timeouts.{name}" for name in BOUNDS[sign.state])
    return (
        f" ({time.strftime('%F %T', time.localtime(sign.time))}), and no sign of life since; one"
        f" was due after {sign.limit:.0f} s ({bounds}): look at process {sign.pid} ({state}),"
        f" {look}"
    )
