"""From data sets in the formats of Polaris and DeepCoder to prompts, on small local samples."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.commands.prepare import REASONS, PrepareSettings, prepare
from megatron_rl.data.overlap import Overlap
from megatron_rl.data.prompt_format import save_tiny_tokenizer
from megatron_rl.data.published import TRAINING_SETS
from megatron_rl.data.question import DataError
from megatron_rl.data.tables import Source, read_questions

ROOT = Path(__file__).parents[2]
SAMPLES = Path(__file__).with_name("samples")
FILES = ["dropped.jsonl", "heldout.jsonl", "report.json", "train.jsonl"]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["data", "prepare", *map(str, arguments)])


def polaris(output: Path, *more: str | Path, local: Path = SAMPLES / "polaris.jsonl") -> Any:
    against = SAMPLES / "evaluation.jsonl"
    options = ["--local", local, "--against", against, "--heldout", "4", *more]
    return run("polaris", output, *options)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_polaris_gives_the_documented_files_and_lists_dropped_rows(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    done = polaris(tmp_path / "out", "--tokenizer", tmp_path, "--max-tokens", "400")
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == FILES
    train, heldout, dropped = (rows(out / f"{n}.jsonl") for n in ("train", "heldout", "dropped"))
    report = json.loads((out / "report.json").read_text())
    assert (len(train), len(heldout), len(dropped)) == (25, 4, 9)
    assert (report["rows"], report["train"], report["heldout"]) == (38, 25, 4)
    assert report["dropped"] == {
        **dict.fromkeys(REASONS, 0),
        "broken": 3,
        "unreadable": 1,
        "long": 1,
        "duplicate": 1,
        "conflict": 2,
        "contaminated": 1,
    }
    for name, digest in report["sha256"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert set(train[0]) == {"id", "kind", "prompt", "answer", "difficulty", "meta"}
    assert not {r["id"] for r in train} & {r["id"] for r in heldout}
    assert train[0]["prompt"].endswith("\nPut the final answer in \\boxed{}.")
    by_reason = {r["reason"]: r for r in dropped}
    assert by_reason["contaminated"]["detail"].endswith("evaluation.jsonl/I-1")
    assert by_reason["duplicate"] == {
        "file": "polaris.jsonl",
        "line": 31,
        "id": "polaris/31",
        "reason": "duplicate",
        "detail": "polaris/1",
    }


def test_broken_rows_are_reported_by_line(tmp_path: Path) -> None:
    done = polaris(tmp_path / "out")
    warnings = [line for line in done.stderr.splitlines() if line.startswith("polaris.jsonl:")]
    assert [line.split(":")[1] for line in warnings] == ["6", "10", "37"]
    assert "not JSON" in warnings[0]
    assert "expected an object, found list" in warnings[1]
    assert "no answer (answer); it has difficulty, problem" in warnings[2]
    broken = [r for r in rows(tmp_path / "out" / "dropped.jsonl") if r["reason"] == "broken"]
    assert [r["line"] for r in broken] == [6, 10, 37]


def test_the_same_input_gives_the_same_bytes_wherever_it_stands(tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    shutil.copy(SAMPLES / "polaris.jsonl", other)
    for name, local in (("a", SAMPLES / "polaris.jsonl"), ("b", other / "polaris.jsonl")):
        assert polaris(tmp_path / name, local=local).exit_code == 0
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_tool_runs_without_an_installation_and_gives_the_same_bytes(tmp_path: Path) -> None:
    arguments = ["polaris", str(tmp_path / "a"), "--local", str(SAMPLES / "polaris.jsonl")]
    arguments += ["--against", str(SAMPLES / "evaluation.jsonl"), "--heldout", "4"]
    tool = [sys.executable, str(ROOT / "tools" / "prepare_data.py")]
    subprocess.run([*tool, *arguments], check=True, timeout=120, cwd=tmp_path)
    assert polaris(tmp_path / "b").exit_code == 0
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_deepcoder_reads_the_train_split_of_its_parts_and_checks_the_tests(tmp_path: Path) -> None:
    done = run("deepcoder", tmp_path, "--local", SAMPLES / "deepcoder", "--heldout", "1")
    assert done.exit_code == 0, done.output
    made = rows(tmp_path / "train.jsonl") + rows(tmp_path / "heldout.jsonl")
    assert sorted(r["id"] for r in made) == [
        *(f"deepcoder/lcbv5/{i}" for i in (1, 2)),
        *(f"deepcoder/primeintellect/{i}" for i in (1, 2)),
        *(f"deepcoder/taco/{i}" for i in (1, 2)),
    ]
    called = next(r for r in made if r["id"] == "deepcoder/lcbv5/1")
    assert "def countEven(self, nums: List[int]) -> int:" in called["prompt"]
    assert called["meta"]["metadata"] == {"func_name": "countEven"}
    dropped = rows(tmp_path / "dropped.jsonl")
    assert [r["reason"] for r in dropped] == ["unreadable"] * 2
    assert dropped[0]["detail"] == "the problem has no tests"


def test_the_files_are_read_as_prompts_again(tmp_path: Path) -> None:
    assert polaris(tmp_path).exit_code == 0
    questions = read_questions(Source(tmp_path / "train.jsonl"))
    assert len(questions) == len(rows(tmp_path / "train.jsonl"))
    assert {q.kind for q in questions} == {"math"}
    assert questions[0].gold == "\\sqrt{2}"


@pytest.mark.parametrize("form", ["parquet", "json", "saved"])
def test_other_local_forms_hold_the_same_questions(tmp_path: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    good = [json.loads(x) for x in (SAMPLES / "polaris.jsonl").read_text().splitlines()[10:20]]
    local = tmp_path / "local"
    table = datasets.Dataset.from_list(good)
    if form == "saved":
        table.save_to_disk(str(local))
    else:
        local.mkdir()
        if form == "parquet":
            table.to_parquet(str(local / "train-00000-of-00001.parquet"))
        else:
            (local / "all.json").write_text(json.dumps(good))
    done = run("polaris", tmp_path / "out", "--local", local, "--heldout", "2")
    assert done.exit_code == 0, done.output
    made = rows(tmp_path / "out" / "train.jsonl") + rows(tmp_path / "out" / "heldout.jsonl")
    assert sorted(r["answer"] for r in made) == sorted(r["answer"] for r in good)


def settings(**changes: Any) -> PrepareSettings:
    values = {"source": str(SAMPLES / "polaris.jsonl"), "name": "p", "heldout": 4}
    return PrepareSettings(**{**values, "fields": TRAINING_SETS["polaris"].fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heldout": 35}, "are to be held out; lower --heldout"),
        ({"source": "/nowhere/x.jsonl"}, "no such file or folder"),
        ({"source": str(SAMPLES / "deepcoder" / "taco"), "heldout": 0}, "see the reasons: 3 brok"),
        ({"tokenizer": "/nowhere"}, "give a folder with a tokenizer.json"),
        ({"against": ("no_such_set",)}, "unknown: use one of"),
    ],
)
def test_what_cannot_be_prepared_is_refused_with_the_remedy(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(settings(**changes), tmp_path)
    assert not any(p.name in FILES for p in tmp_path.iterdir())


def test_errors_end_the_command_with_status_2(tmp_path: Path) -> None:
    done = run("no/such/file.jsonl", tmp_path)
    assert done.exit_code == 2
    assert "no such file or folder" in done.stderr


def test_the_heldout_split_stays_when_rows_are_added(tmp_path: Path) -> None:
    longer = tmp_path / "longer.jsonl"
    extra = {"problem": "What is the sum of the digits of the number 98765?", "answer": "35"}
    longer.write_text((SAMPLES / "polaris.jsonl").read_text() + json.dumps(extra) + "\n")
    held = []
    for name, source in (("a", SAMPLES / "polaris.jsonl"), ("b", longer)):
        prepare(settings(source=str(source)), tmp_path / name)
        held.append({r["prompt"] for r in rows(tmp_path / name / "heldout.jsonl")})
    assert len(held[0] & held[1]) >= 3


def test_a_long_answer_is_dropped_and_counted(tmp_path: Path) -> None:
    source = tmp_path / "x.jsonl"
    texts = [("one apple", "1"), ("two pears", "2"), ("three plums", "7" * 3000)]
    source.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in texts))
    made = PrepareSettings(source=str(source), name="x", heldout=1, max_answer_kib=2)
    report = prepare(made, tmp_path / "out")
    assert report["dropped"]["large"] == 1


def prepared(folder: Path, *questions: tuple[str, str], **changes: Any) -> dict[str, Any]:
    """Prepare (question, answer) pairs; return counts, and rows as `train` and `dropped`."""
    source = folder / "rows.jsonl"
    lines = [json.dumps({"prompt": q, "answer": a}) for q, a in questions]
    source.write_text("\n".join(lines))
    made = PrepareSettings(source=str(source), name="x", **{"heldout": 0, **changes})
    report = prepare(made, folder / "out")
    files = {name: rows(folder / "out" / f"{name}.jsonl") for name in ("train", "dropped")}
    return {**report["dropped"], **files}


def test_copies_are_joined_by_the_verifiers_equality_of_their_answers(tmp_path: Path) -> None:
    same = prepared(tmp_path, *(("What is 1+1-1?", a) for a in ("1", "1.0", "\\frac22", "$1$")))
    assert (same["duplicate"], same["conflict"], len(same["train"])) == (3, 0, 1)
    differ = prepared(tmp_path, *(("What is x?", a) for a in ("1", "1.0", "2")), ("y?", "3"))
    assert (differ["duplicate"], differ["conflict"]) == (0, 3)
    assert differ["dropped"][0]["detail"] == "1 and 2"
    # A number and a half is not eleven halves.
    halves = prepared(tmp_path, ("What is z?", "1 \\frac12"), ("What is z?", "11/2"), ("y?", "3"))
    assert halves["conflict"] == 2
    exact = prepared(tmp_path, ("What?", "1"), ("What?", "1.0"), ("y?", "3"), kind="exact")
    assert exact["conflict"] == 2


def test_signs_tell_questions_apart_and_spaces_do_not(tmp_path: Path) -> None:
    two = (
        ("Find x if x+1=3", "Find x if x-1=3"), ("Find x if x<3", "Find x if x>3"),
        ("Compute (2+3)*4", "Compute 2+3*4"), ("Compute 5", "Compute 5!"),
        ("Compute $2^{3+1}$", "Compute $2^3+1$"), ("Compute 1.5", "Compute 15"),
        ("Find $f(1)$", "Find $f'(1)$"), ("Compute |x|", "Compute x"), ("Find x²", "Find x2"),
    )  # fmt: skip
    for a, b in two:
        for answers in (("1", "1"), ("1", "2")):
            made = prepared(tmp_path, (a, answers[0]), (b, answers[1]))
            assert len(made["train"]) == 2, (a, b)
    one = (
        ("Find x if x + 1 = 3.", "find $x$ if $x+1=3$"), ("求 x 的值", "求x的值"),
        ("Compute $x^{2}$", "Compute x^2"), ("Compute x − 1", "Compute x-1"),
        ("Compute $\\left(x\\right)$", "Compute (x)"), ("Compute ２＋２", "Compute 2+2"),
        ("Compute 1,000", "Compute 1000"), ("Compute x²", "Compute x^2"),
    )  # fmt: skip
    for a, b in one:
        assert prepared(tmp_path, (a, "1"), (b, "1"))["duplicate"] == 1, (a, b)


def test_scripts_without_spaces_are_decontaminated(tmp_path: Path) -> None:
    copies = {
        "ja": "太郎は毎日りんごを三個食べます。七日間で何個のりんごを食べますか。",
        "zh": "小明每天吃三个苹果，七天一共吃多少个苹果？",
        "th": "สมชายกินแอปเปิ้ลวันละสามผล เจ็ดวันเขากินทั้งหมดกี่ผล",
        "ko": "철수는 매일 사과를 세 개 먹습니다. 일주일 동안 먹는 사과는 모두 몇 개입니까?",
    }
    evaluation = tmp_path / "eval.jsonl"
    lines = [{"id": name, "prompt": text, "answer": "21"} for name, text in copies.items()]
    evaluation.write_text("\n".join(json.dumps(line) for line in lines))
    around = {"ja": "次の問題を解け。{}答えだけ書くこと。", "zh": "请解题：{}请只写答案。",
              "th": "จงแก้โจทย์นี้ {}", "ko": "다음을 풀어라: {} 답만 써라."}  # fmt: skip
    questions = [
        (around[name].format(text.replace(" ", "")), "21") for name, text in copies.items()
    ]
    questions[3] = (around["ko"].format(copies["ko"]), "21")
    others = [("大きな箱に青い玉が五個と赤い玉が八個入っています。全部で何個ですか。", "13")]
    made = prepared(tmp_path, *questions, *others, against=(str(evaluation),))
    details = [row["detail"].rpartition("/")[2] for row in made["dropped"]]
    assert details == list(copies) and len(made["train"]) == 1


def test_tokens_of_the_chat_template_count(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    question = ("1+1=?", "2")

    def dropped(limit: int) -> int:
        template = {"template": "{prompt}", "tokenizer": str(tmp_path), "max_tokens": limit}
        made = prepared(tmp_path, question, ("1", "1"), **template)
        return int(made["long"])

    # <bos>1+1=?<think>
    assert (dropped(7), dropped(6)) == (0, 1)
    turn = "{{ bos_token }}({% for m in messages %}({{ m.content }}){% endfor %})="
    path.write_text(json.dumps(settings | {"chat_template": turn}))
    # <bos>((1+1=?))=<think>
    assert (dropped(12), dropped(11)) == (0, 1)


def test_overlap_finds_a_question_in_other_words_around_it_and_no_other() -> None:
    index = Overlap(size=4, share=0.5)
    index.add("a", "A train leaves the station at noon and travels 60 miles each hour.")
    index.add("short", "Compute 2+2.")
    moved = "Hint: physics. A TRAIN leaves the $station$ at noon, and travels 60 miles each hour!"
    assert index.find(moved) == "a"
    assert (
        index.find("A train leaves the station at noon, then stops for tea with the queen.") is None
    )
    assert index.find("compute $2+2$") == "short"
    assert index.find("Compute 2+2 and then multiply the result by the number of planets.") is None
    assert index.find("") is None
