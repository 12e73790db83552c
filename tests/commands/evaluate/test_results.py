"""From verdicts to what is written: votes, estimates of a set, points for the fitter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.commands.evaluate import results
from megatron_rl.commands.evaluate.questions import EvaluationSet
from megatron_rl.commands.evaluate.sampling import Answer
from megatron_rl.commands.evaluate.votes import RIGHT, vote
from megatron_rl.data import Prompt
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.scaling.io import read

WRONG = Verdict(Outcome.WRONG, "")


def answer(prompt: int, sample: int, text: str, passed: bool, **more: Any) -> Answer:
    values: dict[str, Any] = {
        "data": "set",
        "tokens": 10,
        "truncated": False,
        "interrupted": False,
        "outcome": Outcome.CORRECT if passed else Outcome.WRONG,
        "reason": "",
        "vote": text,
        **more,
    }
    return Answer(prompt=prompt, sample=sample, text=text, **values)


def questions(*levels: str, kind: str = "math") -> EvaluationSet:
    prompts = [
        Prompt(i, f"q{i}", [1], "gold", task="set", kind=kind, difficulty=level)
        for i, level in enumerate(levels)
    ]
    return EvaluationSet("set", prompts, [f"id{i}" for i in range(len(levels))])


# Two prompts of 4 samples: 3 right of 4, 1 right of 4.
ANSWERS = [
    *(answer(0, i, t, t == "a") for i, t in enumerate("aaab")),
    *(answer(1, i, t, t == "c") for i, t in enumerate("bbcd")),
]


def test_estimates_of_a_set_equal_those_by_hand() -> None:
    found = results.measured(questions("1", "2"), ANSWERS, 4)
    assert found["pass_rate"] == pytest.approx((3 / 4 + 1 / 4) / 2)
    # sampling error: each prompt has variance 3/16 * 4/3 = 1/4 over samples, /4 samples;
    # sqrt(2 * 1/16) / 2 prompts
    assert found["pass_rate_stderr"] == pytest.approx((2 / 16) ** 0.5 / 2)
    # error over prompts: sd of (3/4, 1/4) is sqrt(1/8), over sqrt(2)
    assert found["mean_at_n"]["standard_error"] == pytest.approx(0.25)
    # pass@2 = 1 - C(n-c, 2) / C(4, 2): 1 - 0/6 and 1 - 3/6
    assert found["pass_at_k"]["2"]["value"] == pytest.approx((1 + 0.5) / 2)
    assert found["pass_at_k"]["4"]["value"] == 1.0
    # the commonest answer is right for the first prompt, wrong (b, twice) for the second
    assert found["majority_at_n"]["value"] == 0.5
    assert [r["difficulty"] for r in found["by_difficulty"]] == ["1", "2"]
    assert [r["mean_at_n"]["value"] for r in found["by_difficulty"]] == [0.75, 0.25]
    assert found["verdicts"] == {"correct": 4, "wrong": 4}


def test_one_level_has_no_table_and_programs_have_no_votes() -> None:
    found = results.measured(questions("", "", kind="code"), ANSWERS, 4)
    assert found["by_difficulty"] == []
    assert found["majority_at_n"] is None


@pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_pass_at_k_is_told_for_powers_of_two_and_for_all(samples: int, ks: list[int]) -> None:
    assert results.powers_of_two(samples) == ks


@pytest.mark.parametrize(
    ("kind", "text", "verdict", "wanted"),
    [
        ("math", "x</think>\\boxed{\\frac{1}{2}}", WRONG, "= \\frac12"),
        ("math", "x</think>\\boxed{\\dfrac12}", WRONG, "= \\frac12"),
        ("exact", "x</think>\\boxed{12}<eos>", WRONG, "= 12"),
        ("math", "x</think>\\boxed{0.5}", Verdict(Outcome.CORRECT, ""), RIGHT),
        ("math", "x</think>nothing", Verdict(Outcome.NO_ANSWER, ""), None),
        ("math", "x</think>\\boxed{" + "{" * 10**5 + "}", Verdict(Outcome.TIMED_OUT, ""), None),
        ("math", "x</think>\\boxed{" + "7" * 10**5 + "}", Verdict(Outcome.TIMED_OUT, ""), None),
        ("code", "x</think>```python\nx\n```", WRONG, None),
    ],
)
def test_equal_answers_have_one_vote(
    kind: str, text: str, verdict: Verdict, wanted: str | None
) -> None:
    assert vote(kind, text, verdict, "</think>") == wanted


def result(step: int, rate: float) -> dict[str, Any]:
    compute = {"compute_tokens": 1000.0 * step, "compute_device_hours": step / 10}
    one = {"data": "run", "pass_rate": rate, "pass_rate_stderr": 0.01}
    return {
        "step": step,
        "compute": compute,
        "sets": [{**one, "num_prompts": 10, "samples_per_prompt": 4}],
    }


def test_points_are_read_by_the_fitter_and_a_repeated_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    for step, rate in ((8, 0.3), (16, 0.4), (32, 0.5), (16, 0.45)):
        results.add_points(path, results.fit_rows(result(step, rate), "mine"))
    assert len(path.read_text().splitlines()) == 3
    (series,) = read(path)
    assert series.name == "mine"
    assert list(series.reward) == [0.3, 0.45, 0.5]
    assert list(series.compute) == [0.8, 1.6, 3.2]


def test_points_of_several_sets_are_several_series(tmp_path: Path) -> None:
    several = result(8, 0.3)
    several["sets"] = [{**several["sets"][0], "data": name} for name in ("aime2024", "math500")]
    for step in (8, 16):
        results.add_points(tmp_path / "p.jsonl", results.fit_rows({**several, "step": step}, "r"))
    assert [s.name for s in read(tmp_path / "p.jsonl")] == ["r/aime2024", "r/math500"]


def test_the_difference_to_the_runs_own_evaluation_is_in_standard_errors() -> None:
    row = {"pass_rate": 0.5, "pass_rate_stderr": 0.03}
    beside = results.beside_the_run(row, {"pass_rate": 0.6, "pass_rate_stderr": 0.04})
    assert beside["difference_in_standard_errors"] == pytest.approx(2.0)


def test_completions_are_written_with_prompt_gold_and_verdict(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    results.write_lines(path, results.completion_rows([questions("1", "2")], ANSWERS))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 8
    assert rows[4]["id"] == "id1" and rows[4]["verdict"] == "wrong" and rows[4]["gold"] == "gold"
