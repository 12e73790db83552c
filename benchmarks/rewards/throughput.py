"""Verdicts per minute through the pool, without bombs and with 1% of them.

    python -m benchmarks.rewards.throughput [--count 10000] [--repeats 3] [--write]

A completion has 2 kB of thinking and an answer of the golden table. The two batches hold the same
good completions; the rate counts these alone. Runs alternate, and the median of each is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.rewards.bombs import BOMBS, bomb, typical
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.settings import VerifierSettings

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "rewards_throughput.md"


async def measure(cases: list[dict[str, Any]], workers: int) -> tuple[float, list[str]]:
    """Seconds for all cases on a pool that is running already, and the verdicts."""
    async with VerifierPool(VerifierSettings(workers=workers), ("math",)) as pool:
        started = time.perf_counter()
        calls = (pool.verify("math", c["completion"], c["gold"]) for c in cases)
        verdicts = await asyncio.gather(*calls)
        return time.perf_counter() - started, [v.verdict.value for v in verdicts]


def with_bombs(good: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The good cases, and after every 99 of them a bomb."""
    out: list[dict[str, Any]] = []
    for i, case in enumerate(good, start=1):
        out.append(case)
        if i % 99 == 0:
            out.append({"completion": bomb(i // 99), "gold": "5", "verdict": None})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    good = typical(arguments.count)
    batches = {"typical answers": good, "1% bombs": with_bombs(good)}
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    changed = dict.fromkeys(batches, 0)
    loads = []
    for _ in range(arguments.repeats):
        for name, cases in batches.items():
            loads.append(os.getloadavg()[0])
            took, verdicts = asyncio.run(measure(cases, arguments.workers))
            seconds[name].append(took)
            pairs = zip(verdicts, cases, strict=True)
            changed[name] += sum(c["verdict"] not in (None, v) for v, c in pairs)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rates = {name: 60 * arguments.count / median for name, median in medians.items()}
    lost = 1 - rates["1% bombs"] / rates["typical answers"]
    lines = [
        "# Verdicts per minute",
        "",
        f"`python -m benchmarks.rewards.throughput`: {arguments.count} good completions,"
        f" {arguments.workers} workers, {os.cpu_count()} cores shared with other work (load"
        f" {min(loads):.1f} to {max(loads):.1f}), median of {arguments.repeats} alternating runs."
        f" {len(batches['1% bombs']) - arguments.count} bombs of {len(BOMBS)} kinds, with the"
        " default limits.",
        "",
        "| batch | good verdicts per minute | seconds of each run | good verdicts that changed |",
        "|---|--:|---|--:|",
    ]
    for name in batches:
        runs = ", ".join(f"{s:.1f}" for s in seconds[name])
        lines.append(f"| {name} | {rates[name]:,.0f} | {runs} | {changed[name]} |")
    lines += ["", f"Rate lost to the bombs: {lost:.1%}."]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.write:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
