"""Rows of tables, and the questions or conversations in them.

JSON Lines, JSON and CSV are read with the standard library, the first and the last line by line;
CSV values stay text, so an answer `007` is not read as a number. Everything else (Parquet, Arrow,
folders of `save_to_disk`, data sets on the hub) is read by the `datasets` library (extra `data`).
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from megatron_rl.data.prompt_format import Turn
from megatron_rl.data.question import DataError, Question, gold_text, unreadable
from megatron_rl.rewards.task_verifiers import KINDS

LOADERS = {".parquet": "parquet", ".arrow": "arrow"}  # file types of the `datasets` library
SUFFIXES = (".jsonl", ".csv", ".json", *LOADERS)

_SURROGATE = re.compile(r"\\u[dD]")
_TURNS_TEXT = re.compile(
    r"\s*\[?\s*\{\s*['\"](?:role|content|from|value)['\"]\s*:|.*<\|(?:im_start|start_header_id)\|>"
)
_PARTS = ("context", "passage", "choices", "options")
"""Fields of a table that are a part of the question in another field."""
USUAL_NAMES = {
    "prompt": ("prompt", "problem", "question", "question_content", "instruction", "input"),
    "gold": (
        *("answer", "gold", "final_answer", "expected_answer", "ground_truth"),
        *("reward_model.ground_truth", "tests", "label", "solution", "output"),
    ),
    "difficulty": ("difficulty", "level"),
    "id": ("id", "unique_id", "question_id", "problem_id"),
    "starter": ("starter_code",),
    "response": ("response", "completion", "output"),
}


@dataclass(frozen=True, slots=True)
class Fields:
    """Field names of a table; if empty, the names in `USUAL_NAMES` are tried.

    A dotted name leads into mappings and lists: `reward_model.ground_truth`, `prompt.1.content`.
    """

    prompt: str = ""
    gold: str = ""
    difficulty: str = ""
    id: str = ""
    starter: str = ""  # code that the solution of a programming problem must begin with
    response: str = ""  # text that the supervised stage trains on
    meta: tuple[str, ...] = ()  # fields that go into `Question.meta` under their own names


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
    revision: str | None = None  # commit on the hub; pin it, or the data may change under a run


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row. Example: `TableRow("data/train.jsonl", 17, {"problem": "1+1", "answer": "2"})`."""

    file: str  # file relative to the source; for a data set of the hub, its configuration or name
    line: int  # line in a text file, otherwise the number of the row, from 1
    values: dict[str, Any] = field(default_factory=dict)
    problem: str = ""  # reason why the row is broken; empty if it is not


def read_rows(source: Source) -> Iterator[TableRow]:
    """Yield the rows of a table; a broken row of a text file has a `problem`.

    Raises `DataError`, with the remedy: nothing to read, an unreadable file, a missing library.
    """
    text, path = str(source.path), Path(source.path).expanduser()
    saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    is_file_name = text.endswith(SUFFIXES) and "://" not in text
    if path.is_file():
        yield from _read_file(path, path.name)
    elif path.is_dir() and not saved:
        for file in _files(source):
            yield from _read_file(file, str(file.relative_to(path)))
    elif (is_file_name or text.startswith((".", "/", "~"))) and not saved:
        raise DataError(f"{text}: no such file or folder")
    else:
        yield from _read_with_datasets(source, source.subset or path.name)


def read_questions(
    source: Source,
    *,
    kind: str = "math",
    fields: Fields | None = None,
    dates: tuple[date, date] | None = None,
) -> list[Question]:
    """Read all questions of a table, without a template.

    Args:
        source: the table.
        kind: verifier of rows without a field `kind`.
        fields: names of the fields.
        dates: keep the rows whose `contest_date` is in this range, both ends included.

    Raises `DataError`, with the location: unreadable source, broken row, repeated id, no rows, an
        answer that the verifier cannot read.
    """
    is_file = Path(source.path).is_file()
    questions: dict[str, Question] = {}
    for index, row in enumerate(read_rows(source)):
        location = f"{source.path}{'' if is_file else f': {row.file}'}:{row.line}"
        try:
            if dates is not None and not dates[0] <= _contest_date(row) <= dates[1]:
                continue
            question = make_question(row, str(index), kind, fields or Fields())
            if problem := unreadable(question):
                remedy = "`megatron-rl data prepare` drops and counts such rows"
                raise DataError(f"the verifier cannot read it: {problem}; {remedy}")
        except DataError as e:
            raise DataError(f"{location}: {e}") from None
        if question.id in questions:
            raise DataError(f"{location}: id {question.id!r} occurs twice")
        questions[question.id] = question
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
    prompt = _prompt_text(_prompt(values, fields))
    if code := str(_get(values, fields, "starter") or "").rstrip():
        prompt += f"\n\nThe program must complete this code:\n```python\n{code}\n```\n"
    kind = str(values["kind"] if _present(values.get("kind")) else kind)
    if kind not in KINDS and ":" not in kind:
        names = ", ".join(KINDS)
        raise DataError(f"kind is {kind!r}: one of {names}, or `package.module:function`")
    # A reward function of the user may work without a right answer.
    optional = not fields.gold and (kind == "custom" or ":" in kind)
    gold = _get(values, fields, "gold", "") if optional else _require(values, fields, "gold")
    meta = values["meta"] if _present(values.get("meta")) else {}
    if not isinstance(meta, dict):
        raise DataError(f"meta is a {type(meta).__name__}, expected an object")
    own = {name: _lookup(values, name) for name in fields.meta}
    return Question(
        id=str(_get(values, fields, "id", default_id)),
        kind=kind,
        prompt=prompt,
        gold=gold_text(gold, kind),
        meta={**meta, **{name: value for name, value in own.items() if value is not None}},
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
        prompt, response = _prompt(row.values, fields), _require(row.values, fields, "response")
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


def _prompt(values: dict[str, Any], fields: Fields) -> Any:
    """Return the text or the turns of a prompt; an instruction has its input after it (Alpaca)."""
    prompt, more = _require(values, fields, "prompt"), values.get("input")
    if isinstance(prompt, str) and _TURNS_TEXT.match(prompt):
        raise DataError(f"the prompt is a text of turns, expected turns: {prompt[:80]}")
    if fields.prompt:
        return prompt
    if parts := [name for name in _PARTS if _present(values.get(name)) and values[name]]:
        remedy = "join them, or name the field of the prompt"
        raise DataError(f"{', '.join(parts)} may be a part of the question: {remedy}")
    joined = prompt is values.get("instruction") and _present(more)
    return f"{prompt}\n\n{more}" if joined else prompt


def _turns(value: Any, role: str) -> list[Turn]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], dict):
        prompt = prompt[0].get("content") if prompt[0].get("role") == "user" else None
    if not isinstance(prompt, str):
        remedy = "of several turns, name a text as the field of the prompt: prompt.1.content"
        raise DataError(f"the prompt is neither a text nor one user's turn; {remedy}")
    return prompt


def _names(fields: Fields, role: str) -> tuple[str, ...]:
    name = getattr(fields, role)
    return (name,) if name else USUAL_NAMES[role]


def _lookup(values: Any, name: str) -> Any:
    """Return the value of a name, which may be dotted, or None."""
    if name in values:
        return values[name]
    for part in name.split("."):
        try:
            values = values[int(part) if isinstance(values, list) else part]
        except (LookupError, TypeError, ValueError):
            return None
    return values


def _present(value: Any) -> bool:
    """Return False for a missing value: none, blank, or the NaN of a table's export."""
    if isinstance(value, str):
        return value.strip().lower() not in ("", "nan", "<na>")
    return value is not None and value == value


def _get(values: dict[str, Any], fields: Fields, role: str, default: Any = None) -> Any:
    each = (_lookup(values, name) for name in _names(fields, role))
    return next(filter(_present, each), default)


def _require(values: dict[str, Any], fields: Fields, role: str) -> Any:
    value = _get(values, fields, role)
    if value is None:
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
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: unknown file type, use one of {', '.join(SUFFIXES)}")
    in_datasets = path.suffix in LOADERS
    return _read_with_datasets(Source(path), name) if in_datasets else read_lines(path, name)


def read_lines(path: Path, name: str) -> Iterator[TableRow]:
    """Yield the rows of a CSV file, of an array in a .json, or else of JSON Lines.

    `name` is their `file`, and blank lines are left out. Raises `DataError`, with the remedy, for
    another encoding than UTF-8.
    """
    is_csv = path.suffix == ".csv"
    try:  # of the line ends csv reads its own, and U+2028 is none
        with path.open(encoding="utf-8-sig", newline="" if is_csv else "\n") as file:
            if is_csv:
                reader = csv.DictReader(file)
                for values in reader:
                    problem = "more values than columns" if None in values else ""
                    yield TableRow(name, reader.line_num, values, problem)
            lines: Iterable[str] = file
            if path.suffix == ".json":
                is_array = (text := file.read()).lstrip().startswith("[")
                lines = map(json.dumps, json.loads(text)) if is_array else text.split("\n")
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield TableRow(name, number, *_parse(line))
    except UnicodeDecodeError as e:
        encoding = "UTF-16" if e.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
        remedy = f"convert it, for example with `iconv -f {encoding} -t UTF-8`"
        raise DataError(f"{path}: not UTF-8 ({e.reason}); {remedy}") from None
    except (csv.Error, ValueError, RecursionError) as e:
        raise DataError(f"{path}: {e}; write it as JSON Lines") from None


def _parse(line: str) -> tuple[dict[str, Any], str]:
    """Return the object on a line, and its problem; NaN and infinities are missing values."""
    try:
        values = json.loads(line, parse_constant=lambda _: None)
        if _SURROGATE.search(line):
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return {}, "a text has half of a surrogate pair"
    except (ValueError, RecursionError) as e:
        return {}, f"not JSON: {e}"
    is_object = isinstance(values, dict)
    return (values, "") if is_object else ({}, f"expected an object, found {type(values).__name__}")


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
