"""Verdicts per minute through the pool, without bombs and with 1% of them.

    python -m benchmarks.rewards.throughput [--repeats 3] [--against COMMIT] [--write]

A completion has 2 kB of thinking and an answer of the golden table. Both batches have the same good
completions; the rate counts only these. With `--against` the verifiers of an older commit judge the
same batches. Every run is a process of its own; runs alternate, and their medians are compared. CPU
time is that of the pool's process and its workers; it depends little on the load of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import processor
from benchmarks.rewards import publish
from benchmarks.rewards.bombs import BOMBS, bomb, typical
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier_settings import VerifierSettings

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "rewards_throughput.md"
TYPICAL, BOMBED = "typical answers", "1% bombs"
Runs = dict[tuple[str, str], list[dict[str, Any]]]


async def measure(cases: list[dict[str, Any]], workers: int) -> tuple[float, float, list[str]]:
    """Return seconds and CPU seconds for all cases on a running pool, and the outcomes."""
    async with VerifierPool(VerifierSettings(workers=workers), ("math",)) as pool:
        started, cpu = time.perf_counter(), cpu_seconds(pool)
        calls = (pool.verify("math", c["completion"], c["gold"]) for c in cases)
        verdicts = await asyncio.gather(*calls)
        took = time.perf_counter() - started
        return took, cpu_seconds(pool) - cpu, [v.outcome.value for v in verdicts]


def cpu_seconds(pool: VerifierPool) -> float:
    """Return the CPU time of this process, of the workers and of all their children."""
    servers = [psutil.Process(worker.pid) for worker in pool.workers]
    processes = [p for server in servers for p in (server, *server.children())]
    return time.process_time() + sum(sum(p.cpu_times()[:4]) for p in processes)


def with_bombs(good: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Insert a bomb after every 99 good cases."""
    out: list[dict[str, Any]] = []
    for i, case in enumerate(good, start=1):
        out.append(case)
        if i % 99 == 0:
            out.append({"completion": bomb(i // 99), "gold": "5", "verdict": None})
    return out


def older(commit: str, folder: Path) -> Path:
    """Put the package of a commit of this repository into a folder."""
    command = ["git", "-C", str(ROOT), "archive", commit, "megatron_rl"]
    packed = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def in_process(tree: Path, cases: Path, workers: int) -> dict[str, Any]:
    """Return `seconds`, `cpu` and `verdicts` of one run with the package in `tree`."""
    program = (
        "import asyncio, json, sys; from pathlib import Path;"
        "from benchmarks.rewards.throughput import measure;"
        "cases = json.loads(Path(sys.argv[1]).read_text());"
        "out = asyncio.run(measure(cases, int(sys.argv[2])));"
        "print(json.dumps(dict(zip(('seconds', 'cpu', 'verdicts'), out))))"
    )
    command = [sys.executable, "-P", "-c", program, str(cases), str(workers)]
    paths = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}
    run = subprocess.run(command, check=True, capture_output=True, timeout=900, env=paths)
    return dict(json.loads(run.stdout))


def table(runs: Runs, batches: dict[str, list[dict[str, Any]]], count: int) -> list[str]:
    """Return the rows of all batches and trees, and a line for the bombs of each tree."""
    lines = [
        "| verifiers | batch | good verdicts per minute | seconds of each run | CPU s | changed |",
        "|---|---|--:|---|--:|--:|",
    ]
    rate, cpu = {}, {}
    for (tree, batch), made in runs.items():
        seconds = [run["seconds"] for run in made]
        rate[tree, batch] = 60 * count / statistics.median(seconds)
        cpu[tree, batch] = statistics.median(run["cpu"] for run in made)
        expected = [case["verdict"] for case in batches[batch]]
        changed = sum(
            e not in (None, v)
            for run in made
            for e, v in zip(expected, run["verdicts"], strict=True)
        )
        each = ", ".join(f"{s:.1f}" for s in seconds)
        cells = (f"{rate[tree, batch]:,.0f}", each, f"{cpu[tree, batch]:.1f}", str(changed))
        lines.append(f"| {tree} | {batch} | {' | '.join(cells)} |")
    trees = list(dict.fromkeys(tree for tree, _ in runs))
    lines.append("")
    for tree in trees:
        lost = 1 - rate[tree, BOMBED] / rate[tree, TYPICAL]
        lost_cpu = 1 - cpu[tree, TYPICAL] / cpu[tree, BOMBED]
        lines.append(
            f"Rate lost to the bombs, {tree}: {lost:.1%} by the clock, {lost_cpu:.1%} by CPU time."
        )
    for tree in trees[1:]:
        for batch in batches:
            clock = rate[trees[0], batch] / rate[tree, batch]
            work = cpu[tree, batch] / cpu[trees[0], batch]
            lines.append(
                f"Rate of {trees[0]} over {tree}, {batch}: {clock:.2f} by the clock, {work:.2f} by"
                " CPU time."
            )
    return lines


def main() -> None:
    """Print the table, and write it with --write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    good = typical(arguments.count)
    batches = {TYPICAL: good, BOMBED: with_bombs(good)}
    runs: Runs = defaultdict(list)
    loads = []
    with tempfile.TemporaryDirectory() as name:
        trees = {"this tree": ROOT}
        if arguments.against:
            trees[arguments.against] = older(arguments.against, Path(name))
        for _ in range(arguments.repeats):
            for batch, cases in batches.items():
                path = Path(name, "cases.json")
                path.write_text(json.dumps(cases))
                for label, tree in trees.items():
                    loads.append(os.getloadavg()[0])
                    runs[label, batch].append(in_process(tree, path, arguments.workers))
    against = f" --against {arguments.against}" if arguments.against else ""
    lines = [
        "# Verdicts per minute",
        "",
        f"`python -m benchmarks.rewards.throughput --repeats {arguments.repeats}{against}`,"
        f" {date.today()}, {processor()}: {arguments.count} good completions, {arguments.workers}"
        f" workers, shared with other work (load {min(loads):.1f} to {max(loads):.1f}), median of"
        f" {arguments.repeats} alternating runs."
        f" {len(batches[BOMBED]) - arguments.count} bombs of {len(BOMBS)} kinds, with the default"
        " limits. `changed` counts good verdicts that are not this tree's golden table's.",
        "",
        *table(runs, batches, arguments.count),
    ]
    publish(lines, RESULT if arguments.write else None)


if __name__ == "__main__":
    main()
