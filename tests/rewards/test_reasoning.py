"""reasoning-gym's scorers behind the gate: right, wrong, and no answer that runs code."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.data.reasoning import make_reasoning
from megatron_rl.rewards.base import Outcome, VerifierDown
from megatron_rl.rewards.reasoning_verifier import is_safe, make_reasoning_verifier, score_function
from megatron_rl.rewards.verifier_settings import VerifierSettings
from tests.data.reasoning_tasks import REASONING_TASKS

verify = make_reasoning_verifier(VerifierSettings())
GATED = (
    "countdown",
    "puzzle24",
    "string_insertion",
    "spiral_matrix",
    "binary_matrix",
    "n_queens",
    "simple_integration",
    "polynomial_multiplication",
)


def count_of(task: str) -> int:
    return 5 if task == "tower_of_hanoi" else 10


def test_the_right_answer_passes_and_rubbish_does_not() -> None:
    failures = []
    for task in (*REASONING_TASKS, *GATED):
        for question in make_reasoning(task, count=count_of(task), seed=3):
            gold, meta = question.gold, question.meta
            right = verify(f"</think>\\boxed{{{gold}}}", gold, meta)
            # Not only as an equal text: the scorer must accept it, too.
            spaced = verify(f"</think><answer> {gold}</answer>", "", meta)
            wrong = verify("</think>\\boxed{zzz}", gold, meta)
            if (
                not right.passed
                or spaced.outcome is Outcome.NO_ANSWER
                or wrong.outcome not in (Outcome.WRONG, Outcome.UNPARSABLE)
            ):
                failures.append((task, gold, right.reason, spaced.reason, wrong.reason))
    assert failures == []


def test_an_answer_in_latex_is_the_answer() -> None:
    spellings = {
        ("chain_sum", "-4"): ["x=-4", "$-4$", "\\text{-4}", "\\,-4"],
        ("calendar_arithmetic", "Tuesday"): ["\\text{Tuesday}", "\\mathrm{Tuesday}"],
        ("prime_factorization", "11 × 23"): ["11 \\times 23", "11 \\cdot 23"],
        ("count_bits", "5"): ["n = 5"],
    }
    for (task, gold), answers in spellings.items():
        metadata = {"task": "weekday_offset", "number": 253}
        meta = {"dataset": task, "entry": {"answer": gold, "metadata": metadata}}
        for answer in answers:
            verdict = verify(f"</think>\\boxed{{{answer}}}", gold, meta)
            assert verdict.passed, f"{task} {answer}: {verdict.reason}"
    meta = {"dataset": "chain_sum", "entry": {"answer": "-4", "metadata": {}}}
    for wrong in ("x=4", "-4 \\times 1", "x=-4, y=3", "\\text{not} -4", "4=-4"):
        assert not verify(f"</think>\\boxed{{{wrong}}}", "-4", meta).passed, wrong


@pytest.mark.parametrize("task", GATED)
def test_answers_that_would_run_code_are_unparsable_and_run_nothing(
    task: str, tmp_path: Path
) -> None:
    (question,) = make_reasoning(task, count=1, seed=3)
    mark = tmp_path / "mark"
    attacks = [
        f"__import__('os').system('touch {mark}')",
        f"[open('{mark}', 'w')]",
        f"exec(\"open('{mark}','w')\")",
        "[].__class__.__base__.__subclasses__()",
        "eval(chr(49)+chr(50))",
        "print(1)",
        "lambda: 1()",
        "exit()",
    ]
    for attack in attacks:
        verdict = verify(f"</think><answer>{attack}</answer>", question.gold, question.meta)
        assert verdict.outcome is Outcome.UNPARSABLE, f"{attack}: {verdict.reason}"
        assert "could run code" in verdict.reason
    assert not mark.exists()


def test_the_gate() -> None:
    allowed = {
        ("countdown", "3*(4 + 5)"): True,
        ("countdown", "9**9"): False,
        ("countdown", "x"): False,
        ("simple_integration", "3*x**2/2 + sin(x) + C"): True,
        ("simple_integration", "open(x)"): False,
        ("polynomial_multiplication", "x**2 - 1"): True,
        ("n_queens", "[['Q', '_'], ['_', 'Q']]"): True,
        ("n_queens", "[exit]()"): False,
        ("chain_sum", "anything at all()"): True,
    }
    assert {pair: is_safe(*pair) for pair in allowed} == allowed


def test_there_is_no_answer_without_box_or_tag_or_end_of_thinking() -> None:
    (question,) = make_reasoning("chain_sum", count=1, seed=0)
    for text in (question.gold, f"</think>{question.gold}", f"\\boxed{{{question.gold}}}"):
        assert verify(text, question.gold, question.meta).outcome is Outcome.NO_ANSWER


def test_unknown_and_refused_tasks_are_errors() -> None:
    with pytest.raises(VerifierDown, match="not_a_task"):
        score_function("not_a_task")
    with pytest.raises(VerifierDown, match="run code outside the sandbox"):
        score_function("codeio")
