"""Errors of this verifier and of math-verify on the golden table.

    python -m benchmarks.rewards.golden_vs_stock [--write]

math-verify is called as its documentation shows: `parse` on gold and answer in dollars (unless they
have dollars or a box), `verify(gold, answer)`, 5 s for each. It only tells right from not right, so
here any outcome but `correct` counts as not right for both; the tests check our five outcomes.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.machine import processor
from benchmarks.rewards import publish
from megatron_rl.rewards.math.verdict import math_verdict

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "rewards" / "golden_math.jsonl"
RESULT = ROOT / "benchmarks" / "results" / "rewards_golden.md"
ERRORS = ("false positives", "false negatives")


def stock(answer: str, gold: str) -> bool:
    """Return math-verify's verdict."""
    from math_verify import parse, verify

    texts = [t if "$" in t or "\\boxed" in t else f"${t}$" for t in (gold, answer)]
    return bool(verify(parse(texts[0]), parse(texts[1])))


def main() -> None:
    """Print the table, and write it with --write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    write = parser.parse_args().write
    logging.disable(logging.CRITICAL)
    cases = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    errors: dict[str, Counter[str]] = {"this": Counter(), "stock": Counter()}
    kinds: dict[str, Counter[str]] = {"this": Counter(), "stock": Counter()}
    seconds = Counter[str]()
    for case in cases:
        right = case["verdict"] == "correct"
        for name in ("this", "stock"):
            started = time.process_time()
            if name == "this":
                passed = math_verdict(case["answer"], case["gold"]).passed
            else:
                passed = stock(case["answer"], case["gold"])
            seconds[name] += time.process_time() - started
            if passed != right:
                errors[name][ERRORS[0] if passed else ERRORS[1]] += 1
                kinds[name][case["kind"]] += 1
    lines = [
        "# Errors on the golden table",
        "",
        f"`python -m benchmarks.rewards.golden_vs_stock`, {date.today()}, {processor()}:"
        f" {len(cases)} cases,"
        f" {sum(c['verdict'] == 'correct' for c in cases)} of them right. The table was written for"
        " this verifier, so its own count is no measure of its errors on unseen answers.",
        "",
        f"| verifier | errors | {' | '.join(ERRORS)} | CPU s |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, title in (
        ("this", "megatron_rl"),
        ("stock", f"math-verify {version('math-verify')}"),
    ):
        counts = " | ".join(str(errors[name][w]) for w in ERRORS)
        lines.append(f"| {title} | {errors[name].total()} | {counts} | {seconds[name]:.1f} |")
    lines += ["", "math-verify's errors by kind: "]
    lines[-1] += ", ".join(f"{kind} {n}" for kind, n in kinds["stock"].most_common()) + "."
    publish(lines, RESULT if write else None)


if __name__ == "__main__":
    main()
