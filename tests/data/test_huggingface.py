"""Hugging Face data sets from local copies; the library is imported only when it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.data.question import DataError, Question
from megatron_rl.data.tables import Source, read_questions

datasets = pytest.importorskip("datasets")
ROWS = {"problem": ["1+1?", "2+2?"], "answer": ["2", "4"], "level": ["easy", "hard"]}
QUESTIONS = [
    Question("0", "math", "1+1?", "2", {}, "easy"),
    Question("1", "math", "2+2?", "4", {}, "hard"),
]


def test_a_saved_data_set(tmp_path: Path) -> None:
    datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / "one")
    assert read_questions(Source(tmp_path / "one")) == QUESTIONS


def test_a_split_of_a_saved_dictionary(tmp_path: Path) -> None:
    dictionary = datasets.DatasetDict({"test": datasets.Dataset.from_dict(ROWS)})
    dictionary.save_to_disk(tmp_path / "two")
    assert read_questions(Source(tmp_path / "two", split="test")) == QUESTIONS
    with pytest.raises(DataError, match="no split 'train', it has test"):
        read_questions(Source(tmp_path / "two", split="train"))


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_a_file(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / f"rows.{kind}"
    getattr(datasets.Dataset.from_dict(ROWS), f"to_{kind}")(path)
    assert read_questions(Source(path)) == QUESTIONS


def test_what_cannot_be_loaded_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give a local copy"):
        read_questions(Source("nobody/nothing-of-this-name"))
    path = tmp_path / "x.xyz"
    path.write_text("")
    with pytest.raises(DataError, match="unknown file type"):
        read_questions(Source(path))


def test_the_library_is_not_imported_with_the_module() -> None:
    code = (
        "import sys, megatron_rl.data.tables, megatron_rl.data.published\n"
        "print(sorted({'datasets', 'pyarrow', 'reasoning_gym', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
