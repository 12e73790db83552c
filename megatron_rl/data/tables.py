"""Rows of tables, and the questions or conversations in them.

JSON Lines and CSV are streamed line by line with the standard library; CSV values stay text, so an
answer `007` is not read as a number. Everything else (JSON, Parquet, Arrow, folders of
`save_to_disk`, data sets on the hub) is read by the `datasets` library (extra `data`).
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from megatron_rl.data.prompt_format import Turn
from megatron_rl.data.question import DataError, Question, apply_template

LOADERS = {".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
"""File types of the `datasets` library."""
SUFFIXES = (".jsonl", ".csv", *LOADERS)

USUAL_NAMES = {
    "prompt": ("prompt", "problem", "question", "question_content", "instruction", "input"),
    "gold": ("answer", "gold", "solution", "final_answer", "expected_answer", "tests", "label"),
    "difficulty": ("difficulty", "level"),
    "id": ("id", "unique_id", "question_id", "problem_id"),
    "starter": ("starter_code",),
    "response": ("response", "completion", "output"),
}


@dataclass(frozen=True, slots=True)
class Fields:
    """Field names of a table; if empty, the names in `USUAL_NAMES` are tried."""

    prompt: str = ""
    gold: str = ""
    difficulty: str = ""
    id: str = ""
    starter: str = ""
    """Code that the solution of a programming problem must begin with."""
    response: str = ""
    """Text that the supervised stage trains on."""
    meta: tuple[str, ...] = ()
    """Fields that go into `Question.meta` under their own names."""


@dataclass(frozen=True, slots=True)
class Source:
    """A table. Example: `Source("POLARIS-Project/Polaris-Dataset-53K", revision="3f1c...")`."""

    path: str | Path
    """File, folder of files, folder of `save_to_disk`, name on the hub, or JSON Lines files there
    (`hf://datasets/owner/name/*.jsonl`)."""
    subset: str | None = None
    """Configuration on the hub; in a folder of files, the subfolder of that name, if any."""
    split: str = "train"
    """Split; in a folder of files, those whose names begin with it. If none does, `train` means
    all files."""
    revision: str | None = None
    """Commit on the hub; pin it, or the data may change under a run."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row. Example: `TableRow("data/train.jsonl", 17, {"problem": "1+1", "answer": "2"})`."""

    file: str
    """File relative to the source; for a data set of the hub, its configuration or name."""
    line: int
    """Line in a text file, otherwise the number of the row, from 1."""
    values: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Reason why the row is broken; empty if it is not."""


def read_rows(source: Source) -> Iterator[TableRow]:
    """Yield the rows of a table; a broken row of a text file has a `problem`.

    Raises `DataError`, with the remedy: nothing to read, an unreadable file, a missing library.
    """
    text, path = str(source.path), Path(source.path)
    saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    looks_local = text.startswith((".", "/")) or (text.endswith(SUFFIXES) and "://" not in text)
    if path.is_file():
        yield from _read_file(path, path.name)
    elif path.is_dir() and not saved:
        for file in _files(source):
            yield from _read_file(file, str(file.relative_to(path)))
    elif looks_local and not saved:
        raise DataError(f"{text}: no such file or folder")
    else:
        yield from _read_with_datasets(source, source.subset or path.name)


def read_questions(
    source: Source,
    *,
    kind: str = "math",
    fields: Fields | None = None,
    template: str | None = "{prompt}",
    dates: tuple[date, date] | None = None,
) -> list[Question]:
    """Read all questions of a table.

    Args:
        source: the table.
        kind: verifier of rows without a field `kind`.
        fields: names of the fields.
        template: text with `{prompt}` in it; None appends the verifier's answer-format instruction.
        dates: keep the rows whose `contest_date` is in this range, both ends included.

    Raises `DataError`, with the location: unreadable source, broken row, repeated id, no rows.
    """
    if template is not None and "{prompt}" not in template:
        raise DataError(f"template {template!r}: it must contain {{prompt}}")
    is_file = Path(source.path).is_file()
    questions: dict[str, Question] = {}
    for index, row in enumerate(read_rows(source)):
        location = f"{source.path}{'' if is_file else f': {row.file}'}:{row.line}"
        try:
            if dates is not None and not dates[0] <= _contest_date(row) <= dates[1]:
                continue
            question = make_question(row, str(index), kind, fields or Fields())
        except DataError as e:
            raise DataError(f"{location}: {e}") from None
        if question.id in questions:
            raise DataError(f"{location}: id {question.id!r} occurs twice")
        questions[question.id] = apply_template(question, template)
    if not questions:
        within = "" if dates is None else f" with a contest_date from {dates[0]} to {dates[1]}"
        raise DataError(f"{source.path}: no questions{within}")
    return list(questions.values())


def make_question(row: TableRow, default_id: str, kind: str, fields: Fields) -> Question:
    """Convert a row to a question.

    Raises `DataError`, without the location, for a broken row or one without prompt or answer.
    """
    if row.problem:
        raise DataError(row.problem)
    values = row.values
    prompt = _prompt_text(_require(values, fields, "prompt"))
    if code := str(_get(values, fields, "starter") or "").rstrip():
        prompt += f"\n\nThe program must complete this code:\n```python\n{code}\n```\n"
    kind = str(values.get("kind", kind))
    # A reward function of the user may work without a right answer.
    optional = not fields.gold and (kind == "custom" or ":" in kind)
    gold = _get(values, fields, "gold", "") if optional else _require(values, fields, "gold")
    meta = values.get("meta") or {}
    if not isinstance(meta, dict):
        raise DataError(f"meta is a {type(meta).__name__}, expected an object")
    return Question(
        id=str(_get(values, fields, "id", default_id)),
        kind=kind,
        prompt=prompt,
        gold=gold if isinstance(gold, str) else json.dumps(gold),
        meta={**meta, **{name: values[name] for name in fields.meta if name in values}},
        difficulty=str(_get(values, fields, "difficulty") or ""),
    )


def make_conversation(row: TableRow, fields: Fields) -> tuple[list[Turn], str]:
    """Convert a row to the turns before a response, and the text of the response.

    A row has a prompt and a response, each a text or turns, or else turns as `messages`. The last
    turn is the response, and the assistant's.

    Raises `DataError`, without the location, for a broken row or one without prompt or response.
    """
    if row.problem:
        raise DataError(row.problem)
    turns = row.values.get("messages")
    if turns is None or fields.prompt or fields.response:
        prompt, response = (_require(row.values, fields, part) for part in ("prompt", "response"))
        turns = [*_turns(prompt, "user"), *_turns(response, "assistant")]
    if not isinstance(turns, list):
        raise DataError(f"messages are a {type(turns).__name__}, expected a list of turns")
    for turn in turns:
        if not isinstance(turn, dict) or not all(
            isinstance(turn.get(key), str) and turn[key] for key in ("role", "content")
        ):
            raise DataError(f"a turn has no role or no text: {str(turn)[:80]}")
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        roles = ", ".join(turn["role"] for turn in turns) or "none"
        rule = "the last of two or more turns is the assistant's"
        raise DataError(f"no response: {rule}, not {roles}")
    # Tables of a fixed type give every turn the keys of all.
    turns = [{k: v for k, v in turn.items() if v is not None} for turn in turns]
    return turns[:-1], turns[-1]["content"]


def _contest_date(row: TableRow) -> date:
    if row.problem:
        raise DataError(row.problem)
    value = row.values.get("contest_date")
    try:
        return date.fromisoformat(str(value)[:10])  # of a day, or of a day and a time
    except ValueError:
        raise DataError(f"contest_date is {value!r}: a range of dates needs YYYY-MM-DD") from None


def _turns(value: Any, role: str) -> list[Turn]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, list):
        turns = [t for t in prompt if isinstance(t, dict) and t.get("role") == "user"]
        prompt = turns[0].get("content") if len(turns) == 1 else None
    if not isinstance(prompt, str):
        raise DataError("the prompt is neither a text nor one user's turn")
    return prompt


def _names(fields: Fields, role: str) -> tuple[str, ...]:
    name = getattr(fields, role)
    return (name,) if name else USUAL_NAMES[role]


def _get(values: dict[str, Any], fields: Fields, role: str, default: Any = None) -> Any:
    return next((values[n] for n in _names(fields, role) if values.get(n) is not None), default)


def _require(values: dict[str, Any], fields: Fields, role: str) -> Any:
    value = _get(values, fields, role)
    if value is None or value == "":
        names, label = ", ".join(_names(fields, role)), "answer" if role == "gold" else role
        raise DataError(f"no {label} ({names}); it has {', '.join(sorted(values))}")
    return value


def _files(source: Source) -> list[Path]:
    root = Path(source.path)
    if source.subset and (root / source.subset).is_dir():
        root = root / source.subset
    files = sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not files:
        raise DataError(f"{root}: no {', '.join(SUFFIXES)} file in it")
    of_split = [p for p in files if p.name.startswith(source.split)]
    if not of_split and source.split != "train":
        names = ", ".join(str(p.relative_to(root)) for p in files[:10])
        raise DataError(f"{root}: no file of the split {source.split!r}; it has {names}")
    return of_split or files


def _read_file(path: Path, name: str) -> Iterator[TableRow]:
    if path.suffix == ".jsonl":
        yield from read_lines(path, name)
    elif path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            for values in reader:
                problem = "more values than columns" if None in values else ""
                yield TableRow(name, reader.line_num, values, problem)
    elif path.suffix in LOADERS:
        yield from _read_with_datasets(Source(path), name)
    else:
        raise DataError(f"{path}: unknown file type, use one of {', '.join(SUFFIXES)}")


def read_lines(path: Path, name: str) -> Iterator[TableRow]:
    """Yield the rows of a JSON Lines file, blank lines left out; `name` is their `file`."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            values, problem = {}, ""
            try:
                values = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as e:
                problem = f"not JSON: {e}"
            if not isinstance(values, dict):
                values, problem = {}, f"expected an object, found {type(values).__name__}"
            yield TableRow(name, number, values, problem)


def _read_with_datasets(source: Source, name: str) -> Iterator[TableRow]:
    text = str(source.path)
    try:
        import datasets
    except ImportError as e:
        missing = "the datasets library is missing: install megatron_rl[data]"
        raise DataError(f"{text}: {missing}") from e
    load, path, split = datasets.load_dataset, Path(source.path), source.split
    table: Any
    try:
        if path.is_dir():
            table = datasets.load_from_disk(text)
        elif path.is_file():
            table = load(LOADERS[path.suffix], data_files=text, split="train", streaming=True)
        elif text.startswith("hf://"):
            table = load("json", data_files=text, split="train")
        else:
            table = load(text, source.subset, split=split, revision=source.revision)
        if isinstance(table, datasets.DatasetDict):
            if split not in table:
                raise DataError(f"{text}: no split {split!r}, it has {', '.join(table)}")
            table = table[split]
        for number, values in enumerate(table, start=1):
            yield TableRow(name, number, values)
    except DataError:
        raise
    # `datasets` raises all of these: hub, network, names, broken contents.
    except (OSError, ValueError, TypeError, RuntimeError, datasets.exceptions.DatasetsError) as e:
        remedy = "without a network give a local copy"
        raise DataError(f"{text} (split {split}): {type(e).__name__}: {e}; {remedy}") from e
