"""`verify`, `rewards try` at the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.commands.verify import app
from megatron_rl.config import ConfigError
from tests.rewards.test_math_golden import GOLDEN

HERE = "tests.rewards.custom_rewards"
runner = CliRunner()


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    return str(path)


@pytest.mark.parametrize(("answer", "code", "word"), [("2/4", 0, "correct"), ("3", 1, "wrong")])
def test_verify_prints_the_verdict_and_why(answer: str, code: int, word: str) -> None:
    result = runner.invoke(app, ["verify", "--gold", "1/2", "--answer", answer])
    assert result.exit_code == code
    assert result.stdout.startswith(f"{word}: {answer} is ")


def test_verify_speaks_json() -> None:
    result = runner.invoke(app, ["verify", "--gold", "5", "--answer", "\\boxed{9^{9^9}}", "--json"])
    row = json.loads(result.stdout)
    assert (row["gold"], row["verdict"]) == ("5", "timed_out")
    assert "bits" in row["reason"]


def test_verify_checks_a_file_against_its_expectations(tmp_path: Path) -> None:
    result = runner.invoke(app, ["verify", "--file", str(GOLDEN)])
    assert result.exit_code == 0, result.stdout
    assert result.stdout.startswith(f"{len(GOLDEN.read_text().splitlines())} answers: ")
    file = jsonl(tmp_path / "cases.jsonl", {"gold": "1", "answer": "2", "verdict": "correct"})
    result = runner.invoke(app, ["verify", "--file", file])
    assert result.exit_code == 1
    assert "wrong (expected correct): 2 is not 1" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify"], "give --gold and --answer, or --file"),
        (["verify", "--gold", "1"], "give --gold and --answer, or --file"),
        (["verify", "--file", "/nonexistent.jsonl"], "no such file"),
    ],
)
def test_wrong_use_is_refused_with_the_remedy(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def refused(*arguments: str) -> str:
    """Return the error with which `main` ends the command."""
    with pytest.raises(ConfigError) as e:
        app(list(arguments), standalone_mode=False)
    return str(e.value)


def test_marks_numbers_and_line_separators_of_a_file_are_read(tmp_path: Path) -> None:
    rows = [
        {"gold": 5, "answer": "5"},
        {"gold": "a\u2028b", "answer": "c"},
        {"gold": ".5", "answer": 0.5},
    ]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    file = tmp_path / "cases.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    result = runner.invoke(app, ["verify", "--file", str(file), "--json"])
    verdicts = [json.loads(line)["verdict"] for line in result.stdout.splitlines()]
    assert verdicts == ["correct", "wrong", "correct"], result.output
    completions = [
        {"gold": row["gold"], "completion": f"</think>\\boxed{{{row['gold']}}}\u2028"}
        for row in rows
    ]
    file.write_bytes(
        b"\xef\xbb\xbf" + "\n".join(json.dumps(c, ensure_ascii=False) for c in completions).encode()
    )
    result = runner.invoke(app, ["rewards", "try", str(file), "--json"])
    assert [json.loads(line)["verdict"] for line in result.stdout.splitlines()] == ["correct"] * 3
    file.write_bytes(text.encode("utf-16"))
    assert "iconv -f UTF-16" in refused("verify", "--file", str(file))


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"gold": "1", "answer": "1"}\n{"gold": 1}\n')
    assert f"{file}:2: no text under answer" in refused("verify", "--file", str(file))


def test_try_runs_a_custom_reward_on_samples(tmp_path: Path) -> None:
    rows = [{"completion": c, "gold": "yes", "meta": {"key": 1}} for c in ("yes", "no", "yes")]
    file = jsonl(tmp_path / "samples.jsonl", *rows)
    arguments = ["rewards", "try", file, "--function", f"{HERE}:async_reward", "--samples", "2"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert "row 0: correct, reward +1: custom reward: True" in result.stdout
    assert "row 1: wrong, reward -1" in result.stdout
    assert "row 2" not in result.stdout


def test_try_gives_a_missing_answer_its_reward(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "samples.jsonl", {"completion": "</think>no box", "gold": "5"})
    result = runner.invoke(app, ["rewards", "try", file, "--json"])
    row = json.loads(result.stdout)
    assert (row["verdict"], row["reward"]) == ("no_answer", -1.0)


def test_a_reward_function_that_fails_is_refused(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "samples.jsonl", {"completion": "x", "gold": "y"})
    error = refused("rewards", "try", file, "--function", f"{HERE}:raises")
    assert "KeyError: 'nothing'" in error
