"""From verdicts to output: votes, estimates of a set, tables, points for the fitter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from megatron_rl.commands.evaluate import results
from megatron_rl.data import Prompt
from megatron_rl.data.prompt_format import save_tiny_tokenizer
from megatron_rl.data.question import Question
from megatron_rl.messages import Sample, int_bytes
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.scaling.io import read
from tests.segments import segments

WRONG = Verdict(Outcome.WRONG, "")


def rows(*levels: str, kind: str = "math") -> list[dict[str, Any]]:
    """Return the rows of two prompts of 4 samples: 3 right of 4, and 1 right of 4."""
    return [
        {
            "data": "set",
            "kind": kind,
            "difficulty": level,
            "verdict": "correct" if vote == right else "wrong",
            "vote": vote,
            "tokens": 10,
            "truncated": False,
            "interrupted": False,
        }
        for level, votes, right in zip(levels, ("aaab", "bbcd"), "ac", strict=True)
        for vote in votes
    ]


def test_estimates_of_a_set_equal_those_by_hand() -> None:
    one = results.set_results("set", rows("1", "2"), 4)
    assert one["pass_rate"] == pytest.approx((3 / 4 + 1 / 4) / 2)
    # sampling error: each prompt has variance 3/16 * 4/3 = 1/4 over samples, /4 samples;
    # sqrt(2 * 1/16) / 2 prompts
    assert one["pass_rate_stderr"] == pytest.approx((2 / 16) ** 0.5 / 2)
    # error over prompts: sd of (3/4, 1/4) is sqrt(1/8), over sqrt(2)
    assert one["mean_at_n"]["standard_error"] == pytest.approx(0.25)
    # pass@2 = 1 - C(n-c, 2) / C(4, 2): 1 - 0/6 and 1 - 3/6
    assert one["pass_at_k"]["2"]["value"] == pytest.approx((1 + 0.5) / 2)
    assert one["pass_at_k"]["4"]["value"] == 1.0
    # the most common answer is right for the first prompt, wrong (b, twice) for the second
    assert one["majority_at_n"]["value"] == 0.5
    assert [r["difficulty"] for r in one["by_difficulty"]] == ["1", "2"]
    assert [r["mean_at_n"]["value"] for r in one["by_difficulty"]] == [0.75, 0.25]
    assert one["verdicts"] == {"correct": 4, "wrong": 4}


def test_one_level_has_no_table_and_programs_have_no_votes() -> None:
    one = results.set_results("set", rows("", "", kind="code"), 4)
    assert one["by_difficulty"] == []
    assert one["majority_at_n"] is None


def test_the_table_has_a_row_for_each_level_and_one_for_all(capsys: Any) -> None:
    one = results.set_results("set", rows("1", "2"), 4)
    results.show({"checkpoint": "run", "step": 8, "sets": [one]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run (step 8)"
    for name in ("mean@4", "pass@2", "pass@4", "majority@4"):
        assert name in lines[3]
    cells = [[c.strip() for c in line.split("│")[1:4]] for line in lines if line.startswith("│")]
    assert cells == [["1", "1", "75.0"], ["2", "1", "25.0"], ["all", "2", "50.0 ± 25.0"]]


@pytest.mark.parametrize(
    ("kind", "text", "verdict", "wanted"),
    [
        ("math", "x</think>\\boxed{\\dfrac12 }", WRONG, "= \\dfrac12"),
        ("exact", "x</think>\\boxed{12}<eos>", WRONG, "= 12"),
        ("exact", "x</think>\\boxed{12}<eos>", Verdict(Outcome.CORRECT, ""), "= 12"),
        ("math", "x</think>\\boxed{0.5}", Verdict(Outcome.CORRECT, ""), results.RIGHT),
        ("math", "x</think>nothing", Verdict(Outcome.NO_ANSWER, ""), None),
        ("math", "x</think>\\boxed{" + "{" * 10**5 + "}", Verdict(Outcome.TIMED_OUT, ""), None),
        ("math", "x</think>\\boxed{" + "7" * 10**5 + "}", Verdict(Outcome.TIMED_OUT, ""), None),
        ("code", "x</think>```python\nx\n```", WRONG, None),
    ],
)
def test_a_vote_is_an_answer(kind: str, text: str, verdict: Verdict, wanted: str | None) -> None:
    assert results.vote(kind, text, verdict, "</think>") == wanted


def majority(kind: str, n: int, *answers: tuple[str, Outcome]) -> tuple[float, list[str | None]]:
    """Return majority@n of completions with these answers, and their votes."""
    each = [
        {
            **rows("", "")[0],
            "kind": kind,
            "verdict": outcome,
            "vote": results.vote(kind, f"</think>\\boxed{{{a}}}", Verdict(outcome, ""), "</think>"),
        }
        for a, outcome in answers
    ]
    results.join_votes(each)
    one = results.set_results("set", each, n)
    return one["majority_at_n"]["value"], [row["vote"] for row in each]


def test_right_and_wrong_spellings_are_joined_alike() -> None:
    right, wrong = Outcome.CORRECT, Outcome.WRONG
    halves = ("\\frac12", "0.5", "\\dfrac{1}{2}", "1/2")
    value, votes = majority("math", 6, ("3", right), ("3.0", right), *((a, wrong) for a in halves))
    assert value == 0.0 and votes == [results.RIGHT] * 2 + ["= \\frac12"] * 4
    # Two against two: half of the draws are right.
    tie = (("3", right), ("\\frac62", right), ("2", wrong), ("x = 2", wrong), ("5", wrong))
    value, votes = majority("math", 5, *tie)
    assert value == 0.5 and votes[2:] == ["= 2", "= 2", "= 5"]
    # What cannot be parsed is joined by its text, what timed out is not compared.
    odd = [("\\foo{ 1}", Outcome.UNPARSABLE), ("\\foo{1}", Outcome.UNPARSABLE)]
    value, votes = majority("math", 4, *odd, ("9^{9^9}", Outcome.TIMED_OUT), ("3", right))
    assert value == 0.0 and votes == ["= \\foo{ 1}"] * 2 + ["= 9^{9^9}", results.RIGHT]


def test_answers_without_an_equality_are_joined_by_their_text_whether_right_or_wrong() -> None:
    right, wrong = Outcome.CORRECT, Outcome.WRONG
    poems = [(f"poem {i}", right) for i in range(3)]
    value, votes = majority("my.rewards:score", 5, *poems, ("no", wrong), ("no", wrong))
    assert value == 0.0 and len(set(votes)) == 4
    assert majority("exact", 3, ("7", right), ("7", right), ("8", wrong))[0] == 1.0
    # One text with two verdicts is not right.
    assert majority("my.rewards:score", 3, ("a", right), ("a", right), ("a", wrong))[0] == 0.0


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
    run = {"pass_rate": 0.5, "pass_rate_stderr": 0.03}
    one = {"data": "run", "pass_rate": 0.6, "pass_rate_stderr": 0.04}
    compared = results.compare_with_run(one, run)["run_evaluation"]
    assert compared["difference_in_standard_errors"] == pytest.approx(2.0)
    task = results.compare_with_run({**one, "data": "run/sums"}, {"tasks": {"sums": run}})
    assert task["run_evaluation"] == compared
    for data in ("math500", "run/other"):
        assert "run_evaluation" not in results.compare_with_run({**one, "data": data}, run)


def test_completions_have_prompt_gold_and_verdict_of_their_set(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    sets = {
        name: [(f"id {name}", Prompt(0, f"q {name}", [1], Question("", "exact", "", "gold")))]
        for name in ("a", "b")
    }
    ids = tokenizer.encode("</think>\\boxed{5}<eos>").ids
    samples = [
        (
            Sample(
                group=prompt,
                index=0,
                prompt_id=prompt,
                evaluation=0,
                token_ids=int_bytes(ids),
                logprobs=b"",
                segments=segments(len(ids)),
                spans=[],
                finish_reason="length",
            ),
            WRONG,
        )
        for prompt in (0, 1)
    ]
    rows = results.completion_rows(sets, samples, tokenizer, "</think>")
    results.write_lines(tmp_path / "x.jsonl", rows)
    written = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [(r["data"], r["id"], r["prompt"]) for r in written] == [
        ("a", "id a", "q a"),
        ("b", "id b", "q b"),
    ]
    assert written[1]["verdict"] == "wrong" and written[1]["gold"] == "gold"
    assert written[1]["completion"] == "</think>\\boxed{5}<eos>"
    assert written[1]["vote"] == "= 5" and written[1]["tokens"] == len(ids)
    assert written[1]["truncated"] and not written[1]["interrupted"]
