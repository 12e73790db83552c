"""Seconds until a tiny run goes on after a loss, against its start-up and against a full restart.

    python benchmarks/recovery.py [--out benchmarks/results/recovery.md]

One run of two trainer ranks and two engines on CPU: a third engine joins and leaves, which shows
what a start takes beside a run; an engine is killed, then trainer rank 1, then everything, which is
started again with --resume: what a lost process costs where nothing survives it. All figures are of
this one run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import commit, processor
from tests.fleet.tiny_run import TinyRun, adopt_orphans, prepare

LIMIT = 300.0
STEPS = 400
"""More than the run trains before its last fault."""


def wait(run: TinyRun, condition: Callable[[], Any], what: str) -> Any:
    """Wait for a true value and return it."""
    found: list[Any] = []

    def holds() -> bool:
        value = condition()
        found[:] = [value]
        return bool(value)

    if not run.wait(holds, LIMIT, 0.02):
        raise TimeoutError(
            f"{what}: not within {LIMIT:g} s; the end of the log:\n{run.text()[-3000:]}"
        )
    return found[0]


def kill(*processes: psutil.Process) -> float:
    """Kill processes at once; return the time."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    return time.time()


def sign(run: TinyRun) -> dict[str, Any]:
    """Return the last sign of life of trainer rank 0."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        return dict(json.loads((run.output / "alive.json").read_text()))
    return {}


def next_step(run: TinyRun, after: float) -> float:
    """Wait for the first step that ended after a time; return when."""

    def row() -> Any:
        times = (r["unix_seconds"] for r in run.rows if r["kind"] == "step")
        return next((t for t in times if t > after), None)

    return float(wait(run, row, "the next step"))


def until_ready(run: TinyRun, process: str, since: float, what: str) -> float:
    """Wait until a generator's process is ready; return the seconds since a time."""

    def ready() -> Any:
        events = run.events("generator_ready")
        return [e["unix_seconds"] for e in events if process in f"{e['process']}"]

    return float(wait(run, ready, what)[0]) - since


def joining_engine(run: TinyRun) -> float:
    """Have an engine join the run and leave it; return the seconds of its start."""
    process = psutil.Process(run.join().pid)
    needle = f"process {process.pid} "
    start = until_ready(run, needle, process.create_time(), "the engine that joins is ready")
    process.terminate()
    wait(run, lambda: run.status("joined0") is not None, "the engine that joined leaves")
    assert run.status("joined0") == 0, "the engine that joined did not leave well"
    return start


def lost_engine(run: TinyRun) -> dict[str, float]:
    """Kill an engine's process; the others take its work."""
    first = run.roles()["generator-1"]
    start = until_ready(run, f"process {first.pid} ", first.create_time(), "the first start")
    beside = joining_engine(run)
    steps = run.steps
    wait(run, lambda: run.steps >= steps + 6, "six steps without the engine that joined")
    ready, lost_before = len(run.events("generator_ready")), len(run.events("generator_lost"))
    killed = kill(first)
    wait(run, lambda: len(run.events("generator_lost")) > lost_before, "the loss is noticed")
    lost = run.events("generator_lost")[-1]
    step = next_step(run, lost["unix_seconds"])
    wait(run, lambda: len(run.events("generator_ready")) > ready, "the engine is back")
    back = run.events("generator_ready")[-1]
    loads = [r["transfer_seconds"] for r in run.rows if r.get("transfer_seconds") is not None]
    return {
        "start": start,
        "start beside the run": beside,
        "load": sum(loads) / len(loads),
        "noticed": lost["unix_seconds"] - killed,
        "next step": step - killed,
        "back": back["unix_seconds"] - killed,
    }


def lost_rank(run: TinyRun) -> dict[str, float]:
    """Kill a trainer rank; torchrun restarts the trainer's, and the engines stay."""
    before = run.roles()
    engines = {name: before[name].pid for name in ("generator-0", "generator-1")}
    killed = kill(before["rank1"])
    old = before["rank0"].pid
    new = wait(run, lambda: (p := run.roles().get("rank0")) and p.pid != old and p, "rank 0")
    ready = wait(
        run,
        lambda: (s := sign(run)).get("pid") == new.pid and s["state"] == "training" and s,
        "rank 0 trains",
    )
    step = next_step(run, ready["time"])
    after = run.roles()
    assert {name: after[name].pid for name in engines} == engines, "an engine was restarted"
    return {
        "restart": new.create_time() - killed,
        "start and load": ready["time"] - new.create_time(),
        "batch and step": step - ready["time"],
        "next step": step - killed,
    }


def full_restart(run: TinyRun) -> dict[str, float]:
    """Kill everything, and start it again from the newest checkpoint."""
    killed = kill(*run.processes())
    wait(run, lambda: not run.processes(), "all are gone")
    run.start(trainers=2, generators=2, resume=True)
    return {"next step": next_step(run, killed) - killed}


def report(engine: dict[str, float], rank: dict[str, float], full: dict[str, float]) -> str:
    """Return the result as Markdown."""
    load = os.getloadavg()[2]
    start, whole = engine["start"] + engine["load"], full["next step"]
    beside = engine["start beside the run"] + engine["load"]
    fixed = rank["restart"] + rank["batch and step"]
    rows = [
        ("engine: its loss is noticed", engine["noticed"], "", 0.0),
        ("engine: next step, by the other one", engine["next step"], "full restart", whole),
        ("engine: back at work", engine["back"], "start-up beside the run + one load", beside),
        ("engine: back at work", engine["back"], "start-up before the run + one load", start),
        ("trainer rank: its ranks start again", rank["restart"], "", 0.0),
        ("trainer rank: start and checkpoint load", rank["start and load"], "", 0.0),
        ("trainer rank: from there to a step", rank["batch and step"], "", 0.0),
        ("trainer rank: all without start and load", fixed, "limit", 5.0),
        ("trainer rank: next step", rank["next step"], "full restart", whole),
        ("everything: next step (full restart)", whole, "", 0.0),
    ]
    table = [
        f"| {name} | {seconds:.1f} | "
        + (f"{of} {bound:.1f} | {seconds / bound:.2f} |" if of else "| |")
        for name, seconds, of, bound in rows
    ]
    return "\n".join([
        "# Recovery of a tiny run",
        "",
        f"`python benchmarks/recovery.py`, commit {commit()}, {time.strftime('%Y-%m-%d')},",
        f"{processor()}, load {load:.0f} in the last quarter of an hour.",
        "Two trainer ranks and two engines, one run.",
        "",
        "| lost | seconds | against [s] | ratio |",
        "|---|---|---|---|",
        *table,
        "",
        f"An engine's start-up took {engine['start']:.1f} s while all others started too, and"
        f" {engine['start beside the run']:.1f} s beside the run; one load {engine['load']:.2f} s.",
        "No engine was restarted when the trainer's ranks were.",
        "",
    ])  # fmt: skip


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="recovery_") as folder:
        run = TinyRun(prepare(Path(folder)), STEPS)
        try:
            run.start(trainers=2, generators=2)
            wait(run, lambda: run.steps >= 6, "six steps")
            engine = lost_engine(run)
            print(engine, flush=True)
            steps = run.steps
            wait(run, lambda: run.steps >= steps + 6, "six more steps")
            rank = lost_rank(run)
            print(rank, flush=True)
            steps = run.steps
            wait(run, lambda: run.steps >= steps + 4, "four more steps")
            full = full_restart(run)
            print(full, flush=True)
        finally:
            run.close()
    text = report(engine, rank, full)
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
