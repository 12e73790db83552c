"""Answers made to cost time, and typical ones for comparison."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[2] / "tests" / "rewards" / "golden_math.jsonl"

BOMBS: tuple[str, ...] = (
    "9^{9^9}",
    "9^{9^{9^9}}",
    "2^{3^{4^{5^6}}}",
    "(10^{10})!",
    "((100!)!)!",
    "100000!",
    r"\binom{10^9}{5\cdot10^8}",
    r"\sum_{k=1}^{10^9}\frac{1}{k^k}",
    r"\prod_{k=1}^{10^8} k",
    r"\int_0^1 \frac{\sin(x^{x^x})}{\ln(1+\tan x)} dx",
    r"\lim_{x\to 0}\frac{\sin(\tan x)-\tan(\sin x)}{\arcsin(\arctan x)-\arctan(\arcsin x)}",
    r"\frac{1}{9^{9^9}}",
    r"\sqrt[9^9]{9^{9^9}}",
    "(1+x)^{100000}",
    "0." + "3" * 3000,
    "{" * 50_000 + "}" * 50_000,
    "{" * 100_000,
    r"\frac{" * 20_000 + "1" + "}{2}" * 20_000,
    "(" * 100_000 + ")" * 100_000,
    r"\boxed{" * 15_000 + "1" + "}" * 15_000,
    r"\boxed{" * 15_000,
    "7" * 1_000_000,
    "-" + "7" * 1_000_000,
    "7" * 1_000_000 + "." + "7" * 1000,
    "1," * 50_000 + "2",
    "1," * 2_000 + "2",
    " " * 100_000 + "x",
    "a" * 4_000 + "^",
    "a." * 2_000 + "!",
    r"\text{" * 700 + "}" * 700,
    "answer is " * 10_000 + "x",
    "answer is " + " " * 100_000 + "x",
    "$" * 4_000 + "x",
    "1" + ",000" * 1_000 + ",0",
    "-" * 4_000 + "1",
    "+".join(["x"] * 2_000),
    "x" * 4_000,
    "2^" * 2_000 + "2",
    "1" + "!" * 3_000,
    "(1,2)," * 600 + "(1,2)",
    "|" * 3_000,
    r"\sqrt" * 800 + "2",
    "1+(" * 1_300 + "1" + ")" * 1_300,
    r"\pm 1" * 600,
    "+".join(f"x_{{{i}}}" for i in range(400)),
    "\\" * 50_000,
    r"\sin" * 900 + "x",
)


def bomb(i: int) -> str:
    """Return a completion with the i-th bomb."""
    answer = BOMBS[i % len(BOMBS)]
    return f"Some thoughts.</think> So \\boxed{{{answer}}}" if "answer is" not in answer else answer


def typical(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return completions of 2 kB with answers of the golden table, drawn with replacement.

    Each has `completion`, `gold` and the expected `verdict`.
    """
    rng = random.Random(seed)
    cases = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    plain = [c for c in cases if c["kind"] not in ("extraction", "unparsable", "stock")]
    out = []
    for case in rng.choices(plain, k=count):
        thoughts = "First we see that this is so. " * 64
        completion = f"{thoughts}</think>The answer is $\\boxed{{{case['answer']}}}$."
        out.append({"completion": completion, "gold": case["gold"], "verdict": case["verdict"]})
    return out
