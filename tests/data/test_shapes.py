"""Rows as public data sets write them are read, or refused with row and reason, by every reader."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.data.question import (
    BOX_INSTRUCTION,
    DataError,
    Question,
    apply_template,
    unreadable,
)
from megatron_rl.data.tables import Fields, Source, make_conversation, read_questions, read_rows

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = 72.\n#### 1,072"
MATH = "We have $x^2 = 4$, so $x = \\boxed{2}$ or not. Hence the answer is $\\boxed{\\frac{1}{2}}$."
USER = {"role": "user", "content": "How many?"}
NAN = float("nan")
READ: dict[str, tuple[dict[str, Any], str, str]] = {
    "gsm8k": ({"question": "How many?", "answer": GSM8K}, "How many?", "1,072"),
    "gsm8k, no space": ({"question": "How many?", "answer": "x\n####-5"}, "How many?", "-5"),
    "math": ({"problem": "How many?", "level": "Level 5", "type": "Algebra", "solution": MATH},
             "How many?", "\\frac{1}{2}"),
    "math, fbox": ({"problem": "How many?", "solution": "so \\fbox{7}"}, "How many?", "7"),
    "numina": ({"problem": "How many?", "solution": MATH, "answer": "0.5"}, "How many?", "0.5"),
    "olympiad": ({"question": "How many?", "solution": ["Proof"], "final_answer": ["$\\frac12$"],
                  "is_multiple_answer": False}, "How many?", "\\frac12"),
    "olympiad, several": ({"question": "How many?", "final_answer": ["$1$", "$\\sqrt{2}$"]},
                          "How many?", "1, \\sqrt{2}"),
    "verl": ({"data_source": "x", "prompt": [USER], "ability": "math", "extra_info": {"index": 3},
              "reward_model": {"style": "rule", "ground_truth": "34"}}, "How many?", "34"),
    "verl, flat": ({"prompt": "How many?", "reward_model.ground_truth": "34"}, "How many?", "34"),
    "alpaca": ({"instruction": "Add the numbers.", "input": "3, 4", "output": "7"},
               "Add the numbers.\n\n3, 4", "7"),
    "alpaca, no input": ({"instruction": "Add 3 and 4.", "input": "", "output": "7"},
                         "Add 3 and 4.", "7"),
    "number": ({"prompt": "How many?", "answer": 0}, "How many?", "0"),
    "blank before": ({"prompt": "How many?", "answer": " ", "solution": "\\boxed{3}"},
                     "How many?", "3"),
}  # fmt: skip
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"prompt": "How many?", "answer": NAN}, "no answer"),
    "infinity": ({"prompt": "How many?", "answer": float("inf")}, "no answer"),
    "nan as text": ({"prompt": "How many?", "answer": "NaN"}, "no answer"),
    "null": ({"prompt": "How many?", "final_answer": None}, "no answer"),
    "no entry": ({"prompt": "How many?", "final_answer": []}, "answer ''"),
    "missing as text": ({"prompt": "How many?", "answer": "<NA>"}, "no answer"),
    "context": ({"instruction": "Who?", "context": "A or B.", "answer": "A"}, "context may be"),
    "options": ({"question": "Which?", "options": ["1", "2"], "answer": "A"}, "options may be"),
    "template": ({"prompt": "<|im_start|>user\nHow many?", "answer": "1"}, "a text of turns"),
    "nan prompt": ({"prompt": NAN, "answer": "1"}, "no prompt"),
    "kind": ({"prompt": "How many?", "answer": "1", "kind": "Math"}, "kind is 'Math': one of"),
    "kind of a set": ({"prompt": "?", "answer": "1", "kind": "gsm8k"}, "kind is 'gsm8k'"),
    "meta": ({"prompt": "How many?", "answer": "1", "meta": "text"}, "meta is a str"),
    "open box": ({"prompt": "How many?", "solution": "so \\boxed{3"}, "the last box is not closed"),
    "surrogate": ({"prompt": "How \ud83d many?", "answer": "1"}, "half of a surrogate pair"),
    "surrogate answer": ({"prompt": "How many?", "answer": "\udc00"}, "half of a surrogate pair"),
    "no gold": ({"prompt": "How many?", "answer": "She sells \\includegraphics{x}"}, "answer 'She"),
    "code, number": ({"prompt": "?", "kind": "code", "answer": '{"inputs": 5, "outputs": ["1"]}'},
                     "cannot read it"),
    "code, row": ({"prompt": "?", "kind": "code",
                   "answer": '[{"input": 5, "output": 1, "fn_name": "f", "type": "functional"}]'},
                  "cannot read it"),
    "code, lengths": ({"prompt": "?", "kind": "code", "answer": '{"inputs": ["1"], "outputs": []}'},
                      "1 inputs, 0 outputs"),
}  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prepare(source: Path, output: Path, *more: str) -> Any:
    return CliRunner().invoke(
        app, ["data", "prepare", str(source), str(output), "--heldout", "0", *more]
    )


def made(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "train.jsonl").read_text().split("\n") if line]


def test_each_shape_has_its_gold_in_a_run_and_in_prepare(tmp_path: Path) -> None:
    # Distinct questions, so that none is a duplicate.
    rows = []
    for i, (row, *_) in enumerate(READ.values()):
        texts = {
            k: f"{i}: {v}" for k, v in row.items() if k in ("question", "problem", "instruction")
        }
        if isinstance(row.get("prompt"), str):
            texts["prompt"] = f"{i}: {row['prompt']}"
        elif "prompt" in row:
            texts["prompt"] = [{**USER, "content": f"{i}: {USER['content']}"}]  # type: ignore[assignment]
        rows.append({**row, **texts})
    source = write(tmp_path / "rows.jsonl", rows)
    done = prepare(source, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert " dropped, " not in done.stdout
    run, files = read_questions(Source(source)), made(tmp_path / "out")
    for i, (name, (_, prompt, gold)) in enumerate(READ.items()):
        assert (run[i].prompt, run[i].gold) == (f"{i}: {prompt}", gold), name
        assert unreadable(run[i]) == "", name
        assert (files[i]["answer"], files[i]["kind"]) == (gold, "math"), name
        assert files[i]["prompt"] == f"{i}: {prompt}\n{BOX_INSTRUCTION}", name
    again = [
        apply_template(q, None) for q in read_questions(Source(tmp_path / "out" / "train.jsonl"))
    ]
    assert [(q.prompt, q.gold) for q in again] == [(f["prompt"], f["answer"]) for f in files]


def test_broken_rows_are_dropped_with_their_reason_by_prepare_and_refused_by_a_run(
    tmp_path: Path,
) -> None:
    good = {"prompt": "2+3?", "answer": "5"}
    source = write(tmp_path / "rows.jsonl", [row for row, _ in BROKEN.values()] + [good])
    done = prepare(source, tmp_path / "out")
    assert done.exit_code == 0, done.output
    unreadable_rows = sum(name.startswith(("code", "no gold", "no entry")) for name in BROKEN)
    assert f"{len(BROKEN) - unreadable_rows} dropped, broken" in done.stdout
    assert f"{unreadable_rows} dropped, unreadable" in done.stdout
    dropped = [json.loads(x) for x in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert [row["line"] for row in dropped] == list(range(1, len(BROKEN) + 1))
    for (name, (row, reason)), drop in zip(BROKEN.items(), dropped, strict=True):
        assert reason in f"cannot read it: {drop['detail']}", name
        with pytest.raises(DataError) as e:
            read_questions(Source(write(tmp_path / "one.jsonl", [good, row])))
        assert "one.jsonl:2: " in str(e.value) and reason in str(e.value), name


def test_dotted_names_lead_into_mappings_and_lists(tmp_path: Path) -> None:
    row = {"extra": {"q": ["no", "1+1?"]}, "reward_model": {"ground_truth": "2"}, "n": {"m": 7}}
    source = write(tmp_path / "rows.jsonl", [row])
    fields = Fields(prompt="extra.q.1", gold="reward_model.ground_truth", meta=("n.m", "n.x", "n"))
    (question,) = read_questions(Source(source), fields=fields)
    assert (question.prompt, question.gold) == ("1+1?", "2")
    assert question.meta == {"n.m": 7, "n": {"m": 7}}
    named = ["--prompt-field", "extra.q.1", "--answer-field", "reward_model.ground_truth"]
    assert prepare(source, tmp_path / "out", *named).exit_code == 0
    assert made(tmp_path / "out")[0]["answer"] == "2"
    for name in ("extra.q.2", "extra.x.y", "extra.q.one", "reward_model.ground_truth.x"):
        with pytest.raises(DataError, match=f"no prompt \\({name}\\)"):
            read_questions(Source(source), fields=Fields(prompt=name))


def test_marks_line_ends_and_line_separators_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": "a\u2028b", "answer": "1"}, {"prompt": "c", "answer": "2"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    cells = "prompt,answer\r\na\u2028b,1\r\nc,2\r\n"
    for name, text in (
        ("x.jsonl", "\r\n\r\n".join(lines) + "\r\n"),
        ("x.json", f"[{lines[0]},\n{lines[1]}]"),
        ("x.json", "\n".join(lines)),
        ("x.csv", cells),
    ):
        for mark in (b"", codecs.BOM_UTF8):
            (tmp_path / name).write_bytes(mark + text.encode())
            questions = read_questions(Source(tmp_path / name))
            assert [(q.prompt, q.gold) for q in questions] == [("a\u2028b", "1"), ("c", "2")], name
            assert prepare(tmp_path / name, tmp_path / "out").exit_code == 0
            assert [row["answer"] for row in made(tmp_path / "out")] == ["1", "2"], name
    (tmp_path / "x.json").write_text('[{"prompt": "a", "answer": 1}, 7]')
    with pytest.raises(DataError, match=r"x\.json:2: expected an object, found int"):
        read_questions(Source(tmp_path / "x.json"))


def test_another_encoding_is_refused_with_file_and_remedy(tmp_path: Path) -> None:
    texts = {
        "x.jsonl": '{"prompt": "caf\xe9", "answer": "1"}\n',
        "x.csv": "prompt,answer\n\xe9,1\n",
    }
    texts["x.json"] = f"[{texts['x.jsonl']}]"
    for name, text in texts.items():
        for encoding, remedy in (("utf-16", "UTF-16"), ("latin-1", "LATIN1")):
            path = tmp_path / name
            path.write_bytes(text.encode(encoding))
            with pytest.raises(DataError, match=f"{name}: not UTF-8 .*iconv -f {remedy}"):
                read_questions(Source(path))
            done = prepare(path, tmp_path / "out")
            assert done.exit_code == 2 and f"iconv -f {remedy}" in done.stderr
    (tmp_path / "x.json").write_text('[{"prompt": "a"')
    with pytest.raises(DataError, match=r"x\.json: .*; write it as JSON Lines"):
        read_questions(Source(tmp_path / "x.json"))
    (tmp_path / "x.csv").write_text(f"prompt,answer\n{'a' * 200_000},1\n")
    with pytest.raises(DataError, match=r"x\.csv: field larger"):
        read_questions(Source(tmp_path / "x.csv"))


def test_missing_values_of_other_tables_are_missing(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"prompt": ["a", "b"], "answer": [13.0, NAN], "kind": [None, "exact"]}
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "x.parquet")
    rows = list(read_rows(Source(tmp_path / "x.parquet")))
    assert [row.line for row in rows] == [1, 2]
    with pytest.raises(DataError, match=r"x\.parquet:2: no answer"):
        read_questions(Source(tmp_path / "x.parquet"))


def test_an_instruction_of_the_supervised_stage_has_its_input(tmp_path: Path) -> None:
    row = {"instruction": "Add the numbers.", "input": "3, 4", "output": "7"}
    (table,) = read_rows(Source(write(tmp_path / "rows.jsonl", [row])))
    turns, response = make_conversation(table, Fields())
    assert turns == [{"role": "user", "content": "Add the numbers.\n\n3, 4"}] and response == "7"
    named = make_conversation(table, Fields(prompt="instruction", response="output"))
    assert named[0][0]["content"] == "Add the numbers."


def test_a_question_that_asks_for_a_box_is_not_asked_again() -> None:
    def asked(prompt: str) -> bool:
        question = apply_template(Question("1", "math", prompt, "1"), None)
        assert question.prompt in (prompt, f"{prompt}\n{BOX_INSTRUCTION}")
        return question.prompt == prompt

    for prompt in (
        "1+1? Please reason step by step, and put your final answer within \\boxed{}.",
        "Write the result in \\boxed{...}. What is 1+1?",
        "1+1?\nPresent the answer in LaTeX format: \\boxed{Your answer}",
        "1+1? Use \\boxed{} for your final answer.",
        "1+1? Give the answer in boxed form.",
        "1+1? Put your answer in a box.",
        "1+1? Box your final answer.",
        "1+1等于几？请把最终答案放在\\boxed{}中。",
    ):
        assert asked(prompt), prompt
    for prompt in (
        "A box has 3 balls, and another box has 4. How many balls are there?",
        "Fill in the blank: $\\boxed{\\phantom{0}} + 3 = 5$.",
        "Tom puts 3 balls into each of 4 boxes. How many balls does he need?",
    ):
        assert not asked(prompt), prompt
    code = Question("1", "code", "Print it in \\boxed{} as the answer.", "[]")
    assert apply_template(code, None).prompt != code.prompt
