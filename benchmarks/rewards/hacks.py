"""A search for wrong answers that pass, ten times as long as the property test.

    python -m benchmarks.rewards.hacks [--count 2000] [--seed 1] [--write]

Every gold answer of the golden table meets `count` answers that are wrong by construction (see
`tests.rewards.hacks`).
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from benchmarks.rewards import publish
from megatron_rl.rewards.math import math_verdict
from tests.rewards.hacks import hacks
from tests.rewards.test_math_hacks import KINDS

RESULT = Path(__file__).parents[1] / "results" / "rewards_hacks.md"


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
    for gold, kind in KINDS.items():
        for family, answer in hacks(gold, kind, arguments.count, arguments.seed):
            started = time.process_time()
            verdict = math_verdict(answer, gold)
            seconds[family] += time.process_time() - started  # type: ignore[assignment]
            tried[family] += 1
            if verdict.passed:
                passed[family] += 1
                print(f"passed: {answer!r} for {gold!r}")
    lines = [
        "# Wrong answers that pass",
        "",
        f"`python -m benchmarks.rewards.hacks --count {arguments.count} --seed {arguments.seed}`:"
        f" {len(KINDS)} gold answers, {arguments.count} generated wrong answers each,"
        f" {sum(seconds.values()):.0f} s of CPU time.",
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
