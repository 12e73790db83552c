"""A search for wrong answers that pass, ten times as long as the property test.

    python -m benchmarks.rewards.hacks [--count 2000] [--seed 1] [--write]

Every gold answer of the golden table meets `count` answers that are wrong by construction (see
`tests.rewards.hacks`).
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks.machine import processor
from benchmarks.rewards import publish
from megatron_rl.rewards.math import math_verdict
from tests.rewards.hacks import hacks
from tests.rewards.test_math_hacks import KINDS

RESULT = Path(__file__).parents[1] / "results" / "rewards_hacks.md"


def search(gold: str, count: int, seed: int) -> dict[str, tuple[int, float, list[str]]]:
    """Return (answers, CPU seconds, those that pass) of each family for one gold answer."""
    out: dict[str, tuple[int, float, list[str]]] = {}
    for family, answer in hacks(gold, KINDS[gold], count, seed):
        started = time.process_time()
        verdict = math_verdict(answer, gold)
        number, spent, passed = out.get(family, (0, 0.0, []))
        spent += time.process_time() - started
        out[family] = number + 1, spent, [*passed, answer] if verdict.passed else passed
    return out


def main() -> None:
    """Print the table and every answer that passed, and write the table with --write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    tried: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    one = partial(search, count=arguments.count, seed=arguments.seed)
    with ProcessPoolExecutor(os.cpu_count(), get_context("forkserver")) as pool:
        for gold, families in zip(KINDS, pool.map(one, KINDS), strict=True):
            for family, (number, spent, answers) in families.items():
                tried[family] += number
                passed[family] += len(answers)
                seconds[family] += spent  # type: ignore[assignment]
                for answer in answers:
                    print(f"passed: {answer!r} for {gold!r}")
    lines = [
        "# Wrong answers that pass",
        "",
        f"`python -m benchmarks.rewards.hacks --count {arguments.count} --seed {arguments.seed}`,"
        f" {date.today()}, {processor()}: {len(KINDS)} gold answers, {arguments.count} generated"
        f" wrong answers each, {sum(seconds.values()):.0f} s of CPU time.",
        "",
        "| family | answers | passed | ms each |",
        "|---|--:|--:|--:|",
    ]
    for family, count in tried.items():
        each = 1000 * seconds[family] / count
        name = family.replace("_", " ")
        lines.append(f"| {name} | {count:,} | {passed[family]} | {each:.2f} |")
    publish(lines, RESULT if arguments.write else None)


if __name__ == "__main__":
    main()
