"""Questions from text files: fields, templates, errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.data.published import BENCHMARKS, load_benchmark
from megatron_rl.data.question import DataError, Question, apply_template, fingerprint
from megatron_rl.data.tables import Fields, Source, read_questions

TESTS = '[{"input": "4", "output": "8"}]'


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    return path


def test_the_usual_field_names_are_found(tmp_path: Path) -> None:
    rows = [
        {"problem": "1+1?", "answer": 2, "level": 3, "unique_id": "a"},
        {"question": "2+2?", "gold": "4", "kind": "exact", "meta": {"eos": "<eos>"}},
    ]
    assert read_questions(Source(write(tmp_path / "q.jsonl", *rows))) == [
        Question("a", "math", "1+1?", "2", {}, "3"),
        Question("1", "exact", "2+2?", "4", {"eos": "<eos>"}, ""),
    ]


def test_named_fields_come_first_and_meta_fields_are_kept(tmp_path: Path) -> None:
    row = {"prompt": "no", "text": "yes", "answer": "no", "right": [1], "extra": 7, "n": "x"}
    fields = Fields(prompt="text", gold="right", id="n", meta=("extra", "absent"))
    (question,) = read_questions(Source(write(tmp_path / "q.jsonl", row)), fields=fields)
    assert question == Question("x", "math", "yes", "1", {"extra": 7}, "")


def test_a_template_with_other_braces_is_no_trap() -> None:
    question = apply_template(Question("1", "math", "{a}", "1"), "{prompt} Use \\boxed{}.")
    assert question.prompt == "{a} Use \\boxed{}."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{broken", r"q.jsonl:1: not JSON"),
        ("[1]", r"q.jsonl:1: expected an object, found list"),
        ('{"prompt": "x", "answer": "1", "meta": [1]}', "q.jsonl:1: meta is a list"),
        ('{"answer": "1"}', r"q.jsonl:1: no prompt \(prompt, problem, .*\); it has answer"),
        ('{"prompt": "x", "answer": ""}', r"q.jsonl:1: no answer"),
        ('{"prompt": "x", "answer": "1", "id": 5}\n' * 2, r"q.jsonl:2: id '5' occurs twice"),
        ("\n", "no questions"),
    ],
)
def test_errors_name_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_questions(Source(path))


def test_csv_values_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text('question,answer\n"a, b\nc",007\nx,NA\n')
    questions = read_questions(Source(path))
    assert [(q.prompt, q.gold) for q in questions] == [("a, b\nc", "007"), ("x", "NA")]
    path.write_text("question,answer\nx,1,2\n")
    with pytest.raises(DataError, match=r"q\.csv:2: more values than columns"):
        read_questions(Source(path))


def test_a_folder_has_the_files_of_the_split(tmp_path: Path) -> None:
    write(tmp_path / "train-0.jsonl", {"prompt": "1+1?", "answer": "2"})
    write(tmp_path / "test-0.jsonl", {"prompt": "2+2?", "answer": "4"})
    assert [q.gold for q in read_questions(Source(tmp_path))] == ["2"]
    assert [q.gold for q in read_questions(Source(tmp_path, split="test"))] == ["4"]
    with pytest.raises(DataError, match=r"no file of the split 'val'; it has test-0\.jsonl, tr"):
        read_questions(Source(tmp_path, split="val"))
    (tmp_path / "train-0.jsonl").unlink()
    assert [q.gold for q in read_questions(Source(tmp_path))] == ["4"]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_questions(Source(tmp_path / "none.jsonl"))


def test_another_data_set_has_another_fingerprint() -> None:
    a, b = Question("1", "math", "x", "1"), Question("2", "math", "x", "1")
    assert fingerprint([a, b]) == fingerprint([a, b])
    others = [
        [b, a],
        [a],
        [Question("1", "math", "x", "2"), b],
        [Question("1", "code", "x", "1"), b],
    ]
    assert len({fingerprint(q) for q in ([a, b], *others)}) == 5


def test_benchmarks_are_found_by_name_and_read_from_a_local_copy(tmp_path: Path) -> None:
    row = {"problem": "p", "answer": "7", "unique_id": "u/1", "level": 5}
    path = write(tmp_path / "copy.jsonl", row)
    for name in ("MATH-500", "math500"):
        (question,) = load_benchmark(f"{name}={path}")
        assert (question.id, question.gold, question.difficulty) == ("u/1", "7", "5")
    assert load_benchmark(str(path))[0].gold == "7"
    assert {"aime2024", "aime2025", "math500", "livecodebench"} <= set(BENCHMARKS)


def test_livecodebench_carries_the_tests_and_the_functions_name(tmp_path: Path) -> None:
    row = {
        "question_content": "Double it.",
        "question_id": "q1",
        "difficulty": "easy",
        "private_test_cases": '[{"input": "4", "output": "8", "testtype": "functional"}]',
        "metadata": '{"func_name": "double"}',
    }
    (question,) = load_benchmark(f"LiveCodeBench={write(tmp_path / 'lcb.jsonl', row)}")
    assert (question.kind, question.difficulty) == ("code", "easy")
    assert question.meta == {"metadata": '{"func_name": "double"}'}


def test_a_range_of_dates_keeps_the_problems_of_its_contests(tmp_path: Path) -> None:
    days = ("2024-12-31T23:00:00", "2025-01-01T00:00:00", "2025-06-30", "2025-07-01")
    rows = [
        {"question_content": f"Problem {i}.", "question_id": f"q{i}", "contest_date": day,
         "private_test_cases": TESTS, "metadata": "{}"}
        for i, day in enumerate(days)
    ]  # fmt: skip
    lcb = f"livecodebench={write(tmp_path / 'lcb.jsonl', *rows)}"
    for dates, kept in (
        ("", "0123"), ("@2025-01-01..2025-06-30", "12"), ("@2025-01-01..", "123"),
        ("@..2025-01-01", "01"), ("@2025-07-01..2025-07-01", "3"),
    ):  # fmt: skip
        assert [q.id for q in load_benchmark(lcb + dates)] == [f"q{i}" for i in kept]
    undated = write(tmp_path / "x.jsonl", {"prompt": "p", "answer": "7"})
    for entry, message in (
        (f"{lcb}@2026-01-01..", "no questions with a contest_date from 2026-01-01 to 9999-12-31"),
        (f"{lcb}@2025-02-30..", "day is out of range"),
        (f"{undated}@2025-01-01..", r"x\.jsonl:1: contest_date is None: a range of dates needs"),
    ):
        with pytest.raises(DataError, match=message):
            load_benchmark(entry)


def test_an_unknown_benchmark_names_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"'aime1999' is unknown: use one of aime2024"):
        load_benchmark("aime1999")


def test_code_that_tests_call_by_name_is_part_of_the_prompt(tmp_path: Path) -> None:
    path = write(
        tmp_path / "lcb.jsonl",
        {
            "question_content": "Count the even ones.",
            "private_test_cases": TESTS,
            "starter_code": "class Solution:\n    def count(self, nums):\n        ",
            "question_id": "1",
            "difficulty": "easy",
            "metadata": '{"func_name": "count"}',
        },
        {
            "question_content": "Read a number.",
            "private_test_cases": TESTS,
            "starter_code": "",
            "question_id": "2",
            "difficulty": "easy",
            "metadata": "{}",
        },
    )
    called, read = load_benchmark(f"livecodebench={path}")
    assert "```python\nclass Solution:\n    def count(self, nums):\n```" in called.prompt
    assert called.prompt.startswith("Count the even ones.")
    assert called.meta == {"metadata": '{"func_name": "count"}'}
    assert apply_template(read, None).prompt.startswith("Read a number.\nAnswer with one complete")
    assert "complete this code" not in read.prompt


def test_a_prompt_may_be_one_users_turn_and_no_other_structure(tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}
    prefill, parts = {"role": "assistant", "content": "It is"}, [{"type": "text", "text": "1+1?"}]
    row = {"prompt": [user], "answer": "2"}
    (question,) = read_questions(Source(write(tmp_path / "a.jsonl", row)))
    assert question.prompt == "1+1?"
    for prompt in ([system, user], [user, prefill], [user, prefill, user], [prefill], [],
                   [{**user, "content": parts}], {"text": "1+1?"}, 7):  # fmt: skip
        path = write(tmp_path / "b.jsonl", {"prompt": prompt, "answer": "2"})
        with pytest.raises(DataError, match=r"b\.jsonl:1: the prompt is neither a text nor one us"):
            read_questions(Source(path))
    # A field may lead to one of the turns.
    path = write(tmp_path / "b.jsonl", {"prompt": [system, user], "answer": "2"})
    (question,) = read_questions(Source(path), fields=Fields(prompt="prompt.1.content"))
    assert question.prompt == "1+1?"
    again = ('[{"content": "1+1?", "role": "user"}]', '{"from": "human", "value": "1+1?"}')
    for text in (json.dumps([user]), str([user]), *again):
        path = write(tmp_path / "c.jsonl", {"prompt": text, "answer": "2"})
        with pytest.raises(DataError, match=r"c\.jsonl:1: the prompt is a text of turns"):
            read_questions(Source(path))


def test_a_prompt_ends_with_the_answer_format_of_its_verifier(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1?", "answer": "2"},
        {"prompt": "Print 2.", "answer": TESTS, "kind": "code"},
        {"prompt": "A poem.", "answer": "", "kind": "my.rewards:score"},
        {"prompt": "2", "answer": "2", "kind": "exact"},
    ]
    path = write(tmp_path / "mixed.jsonl", *rows)
    maths, code, own, exact = (apply_template(q, None) for q in read_questions(Source(path)))
    assert maths.prompt == "1+1?\nPut the final answer in \\boxed{}."
    assert code.prompt.startswith("Print 2.\nAnswer with one complete Python program")
    assert (own.prompt, own.gold, exact.prompt) == ("A poem.", "", "2")
    assert [apply_template(q, None) for q in (maths, code, own)] == [maths, code, own]


def test_a_reward_function_may_need_no_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "poems.jsonl", {"prompt": "A poem."}, {"prompt": "0?", "answer": 0})
    assert [q.gold for q in read_questions(Source(path), kind="my.rewards:score")] == ["", "0"]
    with pytest.raises(DataError, match=r"poems\.jsonl:1: no answer \(rhyme\)"):
        read_questions(Source(path), kind="my.rewards:score", fields=Fields(gold="rhyme"))
    with pytest.raises(DataError, match=r"poems\.jsonl:1: no answer"):
        read_questions(Source(path), kind="math")
