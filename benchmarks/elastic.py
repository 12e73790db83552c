"""The learning curve of a run whose engines go from 1 to 4 to 2, beside that of a fixed fleet.

    python benchmarks/elastic.py [--out benchmarks/results/elastic.md]

Two runs of one tiny model and one seed on CPU, one after the other: two trainer ranks and one
engine; in the second run three engines join by themselves at step 10, and two of them leave later.
Both must train the same prompts in the same order, each once, within the bound of the lag; sampling
differs, so the pass rates may differ by their standard errors.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import commit, processor
from tests.fleet.driver import END_SECONDS, disturb
from tests.fleet.faults import Fault
from tests.fleet.tiny_run import HELD_OUT, TinyRun, adopt_orphans, prepare

SAMPLES = 16
LIMIT = 4.0
"""Standard errors by which the two runs may differ at one evaluation."""


@dataclass
class LaterChange(Fault):
    """A change of the fleet, so many steps after the one before it is done."""

    steps: int = 0

    def run(self, run: TinyRun) -> None:
        """Wait for the steps, and change the fleet."""
        agent, end = run.agent, run.steps + self.steps
        assert agent is not None
        run.wait(lambda: run.steps >= end or agent.poll() is not None, END_SECONDS)
        super().run(run)


def curve(
    config: Path, points: Mapping[str, int], steps: int, rate: float
) -> dict[int, dict[str, Any]]:
    """Train with these changes of the fleet; return the evaluations by step, with the engines."""
    settings = [f"--optimizer.learning_rate={rate}", f"--evaluation.samples_per_prompt={SAMPLES}"]
    run = TinyRun(config, steps, settings)
    try:
        changes = [LaterChange(point, steps=after) for point, after in points.items()]
        if wrong := disturb(run, changes, 2, 1, lambda row: print(row, flush=True)):
            raise SystemExit(f"{'; '.join(wrong)}\n{run.text()[-3000:]}")
        rows = run.rows
        engines = {row["step"]: row["generators"] for row in rows if row["kind"] == "step"}
        return {
            row["step"]: {"pass_rate": row["pass_rate"], "engines": engines.get(row["step"] - 1, 1)}
            for row in rows
            if row["kind"] == "eval"
        }
    finally:
        run.close()


def errors(first: float, second: float) -> float:
    """Return the difference of two pass rates in its standard errors."""
    mean = min(max((first + second) / 2, 0.02), 0.98)
    return (first - second) / math.sqrt(2 * mean * (1 - mean) / (HELD_OUT * SAMPLES))


def main() -> None:
    """Run both, print the table, and fail if the curves differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=8e-6, help="learning rate")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="elastic_") as folder:
        config = prepare(Path(folder))
        fixed = curve(config, {}, options.steps, options.rate)
        changes = {"join:3:now": 10, "term:joined0:decoding": 20, "term:joined1:decoding": 10}
        elastic = curve(config, changes, options.steps, options.rate)
    shown = [step for step in sorted(fixed) if step in elastic]
    off = {s: errors(elastic[s]["pass_rate"], fixed[s]["pass_rate"]) for s in shown}
    mean = sum(off.values()) / len(off)
    each = max(len(shown) // 12, 1)
    text = "\n".join([
        "# The curve of an elastic fleet",
        "",
        f"`python benchmarks/elastic.py`, commit {commit()}, {time.strftime('%Y-%m-%d')},",
        f"{processor()}.",
        f"{options.steps} steps each; both trained the same prompts in the same order, each once.",
        f"{len(shown)} evaluations of {HELD_OUT} prompts, {SAMPLES} completions each; the largest",
        f"difference is {max(off.values(), key=abs):.1f} standard errors, the mean {mean:.2f}.",
        "",
        "| step | pass rate, 1 engine | pass rate, elastic | its engines | standard errors |",
        "|---|---|---|---|---|",
        *(
            f"| {s} | {fixed[s]['pass_rate']:.3f} | {elastic[s]['pass_rate']:.3f}"
            f" | {elastic[s]['engines']} | {off[s]:.1f} |"
            for s in [*shown[:-1:each], shown[-1]]
        ),
        "",
    ])  # fmt: skip
    print(text)
    if options.out is not None:
        options.out.write_text(text)
    if max(map(abs, off.values())) > LIMIT:
        raise SystemExit(f"the curves differ by more than {LIMIT:g} standard errors")


if __name__ == "__main__":
    main()
