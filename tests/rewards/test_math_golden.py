"""The golden table and known faults of other verifiers, from every kind of caller."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.data.question import gold_text
from megatron_rl.rewards.math import math_verdict, verify
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier_settings import VerifierSettings

GOLDEN = Path(__file__).with_name("golden_math.jsonl")
CASES: list[dict[str, str]] = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
READINGS: list[dict[str, str]] = [
    json.loads(line)
    for line in GOLDEN.with_name("golden_readings.jsonl").read_text("utf-8").split("\n")
    if line
]
"""Spellings of data sets and models, and wrong answers that other rules would let pass."""
# (gold, answer, outcome): each is a fault of math-verify 0.9.0 or of a framework around it.
PITFALLS = [
    ("2", "\\boxed{1}. Wait, ... \\boxed{2}", "correct"),
    ("$4\\sqrt(2)$", "$4$", "wrong"),
    ("$\\frac1{\\sqrt n}$", "$\\sqrt{1/n}$", "correct"),
    ("1/2006!", "1/2004!", "wrong"),
    ("1/2^98", "1/2^99", "wrong"),
    ("1+\\frac1{\\mathrm e}", "1-\\frac1{\\mathrm e}", "wrong"),
    ("3x + 4y + 14=0", "3*x-1*y+13=0", "wrong"),
    ("1,3,5,\\ldots,2n-1", "1,2,\\ldots,n", "wrong"),
    ("$\\forall x>0, f(x)=0$", "$f(x)=0$", "wrong"),
    ("5", "9^{9^9}", "timed_out"),
    ("(-\\infty, 2]", "x \\le 2", "correct"),
    ("x \\le 2", "(-\\infty, 2]", "correct"),
]


ROWS = [(c["answer"], c["gold"]) for c in CASES] + [(a, g) for g, a, _ in PITFALLS]
EXPECTED = [c["verdict"] for c in CASES] + [outcome for *_, outcome in PITFALLS]


def verify_all() -> list[str]:
    return [verify(answer, gold).outcome.value for answer, gold in ROWS]


def test_the_table_has_enough_cases_of_enough_kinds() -> None:
    assert len(CASES) >= 300
    assert len({c["kind"] for c in CASES}) >= 25
    verdicts = Counter(c["verdict"] for c in CASES)
    assert min(verdicts["correct"], verdicts["wrong"]) >= 100
    assert len({(c["gold"], c["answer"]) for c in CASES}) == len(CASES)
    assert all(c["why"] for c in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['gold']}|{c['answer']}"[:60])
def test_golden_case(case: dict[str, str]) -> None:
    verdict = math_verdict(case["answer"], case["gold"])
    assert verdict.outcome == case["verdict"], f"{verdict.reason} ({case['why']})"
    assert verdict.reason


def test_readings() -> None:
    verdicts = [math_verdict(c["answer"], c["gold"]) for c in READINGS]
    pairs = zip(READINGS, verdicts, strict=True)
    failures = [(c, v.reason) for c, v in pairs if v.outcome != c["verdict"]]
    assert failures == []
    outcomes = Counter(v.outcome.value for v in verdicts)
    assert outcomes["correct"] > 200
    assert sum(outcomes.values()) - outcomes["correct"] > 200


def test_the_gold_answer_of_a_solution_is_what_it_declares() -> None:
    golds = {
        "So it is $.9x$. The final answer is $28\\%$. I hope it is correct. Note: 5": "28\\%",
        "so \\boxed{3}. I hope it is correct.": "3",
        "2 + 3 = 5\n#### 5": "5",
        "the answer is always positive": "the answer is always positive",
    }
    assert {text: gold_text(text, "math") for text in golds} == golds


def test_all_cases_from_the_main_thread() -> None:
    assert verify_all() == EXPECTED


def test_all_cases_from_threads_at_once() -> None:
    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(verify_all) for _ in range(2)]
        assert [r.result(120) for r in results] == [EXPECTED] * 2


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_all_cases_from_a_process(method: str) -> None:
    verify("1", "1")  # a forked process must not share this worker
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(verify_all).result(120) == EXPECTED
    assert verify("2", "2").passed


def test_all_cases_from_asyncio_through_the_pool() -> None:
    async def main() -> list[str]:
        meta: dict[str, Any] = {"boxed": False, "ended_thinking": False}
        async with VerifierPool(VerifierSettings(workers=2), ("math",)) as pool:
            calls = (pool.verify("math", answer, gold, meta) for answer, gold in ROWS)
            verdicts = await asyncio.wait_for(asyncio.gather(*calls), 120)
        return [v.outcome.value for v in verdicts]

    assert asyncio.run(main()) == EXPECTED


def test_verify_works_inside_a_running_event_loop() -> None:
    async def main() -> bool:
        return verify("\\frac12", "0.5").passed

    assert asyncio.run(main())


def test_a_thread_that_started_the_worker_may_end() -> None:
    thread = threading.Thread(target=verify, args=("1", "1"))
    thread.start()
    thread.join(60)
    assert verify("3", "3").passed
