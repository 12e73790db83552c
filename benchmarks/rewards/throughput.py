"""Verdicts per minute through the pool, without bombs and with 1% of them.

    python -m benchmarks.rewards.throughput [--count 10000] [--repeats 3] [--write]

A completion has 2 kB of thinking and an answer of the golden table. Both batches have the same good
completions; the rate counts only these. Runs alternate, and their medians are compared. CPU time is
that of the pool's process and its workers; it depends little on the load of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rewards import publish
from benchmarks.rewards.bombs import BOMBS, bomb, typical
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier_settings import VerifierSettings

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "rewards_throughput.md"


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


def main() -> None:
    """Print the table, and write it with --write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    good = typical(arguments.count)
    batches = {"typical answers": good, "1% bombs": with_bombs(good)}
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    cpu: dict[str, list[float]] = {name: [] for name in batches}
    changed = dict.fromkeys(batches, 0)
    loads = []
    for _ in range(arguments.repeats):
        for name, cases in batches.items():
            loads.append(os.getloadavg()[0])
            took, used, verdicts = asyncio.run(measure(cases, arguments.workers))
            seconds[name].append(took)
            cpu[name].append(used)
            pairs = zip(verdicts, cases, strict=True)
            changed[name] += sum(c["verdict"] not in (None, v) for v, c in pairs)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rates = {name: 60 * arguments.count / median for name, median in medians.items()}
    lost = 1 - rates["1% bombs"] / rates["typical answers"]
    work = {name: statistics.median(times) for name, times in cpu.items()}
    lost_cpu = 1 - work["typical answers"] / work["1% bombs"]
    lines = [
        "# Verdicts per minute",
        "",
        f"`python -m benchmarks.rewards.throughput`: {arguments.count} good completions,"
        f" {arguments.workers} workers, {os.cpu_count()} cores shared with other work (load"
        f" {min(loads):.1f} to {max(loads):.1f}), median of {arguments.repeats} alternating runs."
        f" {len(batches['1% bombs']) - arguments.count} bombs of {len(BOMBS)} kinds, with the"
        " default limits.",
        "",
        "| batch | good verdicts per minute | seconds of each run | CPU s | changed |",
        "|---|--:|---|--:|--:|",
    ]
    for name in batches:
        runs = ", ".join(f"{s:.1f}" for s in seconds[name])
        row = f"| {name} | {rates[name]:,.0f} | {runs} | {work[name]:.1f} | {changed[name]} |"
        lines.append(row)
    lines += [
        "",
        f"Rate lost to the bombs: {lost:.1%} by the clock, {lost_cpu:.1%} by CPU time. `changed`"
        " counts good verdicts that are not the golden table's.",
    ]
    publish(lines, RESULT if arguments.write else None)


if __name__ == "__main__":
    main()
