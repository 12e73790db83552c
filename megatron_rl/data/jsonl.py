"""Questions from JSON Lines, and from rows of any table: which field is what."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.data.question import DataError, Question, worded

PROMPT_FIELDS = ("prompt", "problem", "question", "question_content", "instruction", "input")
GOLD_FIELDS = ("answer", "gold", "solution", "final_answer", "expected_answer", "tests", "label")
DIFFICULTY_FIELDS = ("difficulty", "level")
ID_FIELDS = ("id", "unique_id", "question_id", "problem_id")
STARTER_FIELDS = ("starter_code",)


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of a table's fields; an empty one is looked for under the usual names."""

    prompt: str = ""
    gold: str = ""
    difficulty: str = ""
    id: str = ""
    starter: str = ""
    """Code that a programming problem's solution must begin with."""
    meta: tuple[str, ...] = ()
    """Fields that go into `Question.meta` under their own names."""


def read_jsonl(
    path: str | Path,
    *,
    kind: str = "math",
    fields: Fields | None = None,
    template: str | None = "{prompt}",
) -> list[Question]:
    """Questions of a JSON Lines file; blank lines are skipped.

    Args:
        path: file.
        kind: task kind of rows without a `kind` field.
        fields: names of the fields.
        template: text of a prompt, with `{prompt}` in it; None: the question, and what its verifier
            reads (`INSTRUCTIONS`).

    Raises:
        DataError: no such file, a line that is no JSON object, a row without prompt or answer; with
            file, line and remedy.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with path.open(encoding="utf-8") as file:
        rows = list(_objects(path, file))
    return questions(rows, name=str(path), kind=kind, fields=fields, template=template)


def _objects(path: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as e:
            raise DataError(f"{path}:{number}: not JSON: {e}") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: expected an object, found {type(row).__name__}")
        yield row


def questions(
    rows: Iterable[dict[str, Any]],
    *,
    name: str,
    kind: str,
    fields: Fields | None = None,
    template: str | None = "{prompt}",
) -> list[Question]:
    """Questions of a table's rows.

    Raises:
        DataError: a row without prompt or answer, a repeated id, no row at all.
    """
    if template is not None and "{prompt}" not in template:
        raise DataError(f"template {template!r}: it must contain {{prompt}}")
    names = fields or Fields()
    out: list[Question] = []
    seen: set[str] = set()
    for index, row in enumerate(rows):
        where = f"{name}: row {index}"
        prompt = _required(row, names.prompt, PROMPT_FIELDS, where, "prompt")
        verifier = str(row.get("kind", kind))
        # The user's own function may need none.
        own = not names.gold and (verifier == "custom" or ":" in verifier)
        gold: Any = ""
        if not own or _optional(row, "", GOLD_FIELDS) not in (None, ""):
            gold = _required(row, names.gold, GOLD_FIELDS, where, "answer")
        identity = _optional(row, names.id, ID_FIELDS)
        question = Question(
            id=str(index if identity is None else identity),
            kind=verifier,
            prompt=_asked(prompt, where) + _starter(row, names.starter),
            gold=gold if isinstance(gold, str) else json.dumps(gold),
            meta={**dict(row.get("meta") or {}), **{f: row[f] for f in names.meta if f in row}},
            difficulty=str(_optional(row, names.difficulty, DIFFICULTY_FIELDS) or ""),
        )
        if question.id in seen:
            raise DataError(f"{name}: row {index}: id {question.id!r} occurs twice")
        seen.add(question.id)
        out.append(worded(question, template))
    if not out:
        raise DataError(f"{name}: no questions")
    return out


def _asked(prompt: Any, where: str) -> str:
    """The question: a text, or the user's turn of a conversation with one turn."""
    if isinstance(prompt, list):
        turns = [t for t in prompt if isinstance(t, dict) and t.get("role") == "user"]
        prompt = turns[0].get("content") if len(turns) == 1 else None
    if not isinstance(prompt, str):
        raise DataError(f"{where}: the prompt is neither a text nor one user's turn")
    return prompt


def _starter(row: dict[str, Any], name: str) -> str:
    """What a programming problem asks the solution to begin with: tests call it by that name."""
    code = str(_optional(row, name, STARTER_FIELDS) or "").rstrip()
    return f"\n\nThe program must complete this code:\n```python\n{code}\n```\n" if code else ""


def _required(row: dict[str, Any], name: str, usual: tuple[str, ...], where: str, what: str) -> Any:
    value = _optional(row, name, usual)
    if value is None or value == "":
        looked = name or ", ".join(usual)
        raise DataError(f"{where}: no {what} ({looked}); it has {', '.join(sorted(row))}")
    return value


def _optional(row: dict[str, Any], name: str, usual: tuple[str, ...]) -> Any:
    if name:
        return row.get(name)
    return next((row[n] for n in usual if row.get(n) is not None), None)
