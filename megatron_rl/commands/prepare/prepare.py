"""From a data set to prompts: checked, without duplicates, decontaminated, split; the same bytes
for the same input.

Written into the output folder, UTF-8 with one JSON object in each line:

    train.jsonl, heldout.jsonl   {"id", "kind", "prompt", "answer", "difficulty", "meta"}
    dropped.jsonl                {"file", "line", "id", "reason", "detail"}
    report.json                  counts by reason, settings, SHA-256 of the other three

`train.jsonl` is a task of kind `jsonl`: its prompts are complete (those of an own template need
`template: "{prompt}"` there). The files are written under other names first and renamed together at
the end.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.commands.prepare.overlap import Overlap, words
from megatron_rl.commands.prepare.prepare_check import Check, make_check
from megatron_rl.commands.prepare.prepare_settings import Settings
from megatron_rl.commands.prepare.rows import Row, Rows, open_rows
from megatron_rl.data.benchmarks import load_benchmark
from megatron_rl.data.jsonl import questions
from megatron_rl.data.question import DataError, Question, worded

FORMAT = "megatron_rl.prompts/1"
FILES = ("train.jsonl", "heldout.jsonl", "dropped.jsonl")
REASONS = {
    "broken": "the row is no JSON object, or lacks question or answer",
    "unreadable": "the verifier cannot read the answer, or the tests",
    "large": "the answer, or the tests, are over the limit",
    "long": "the prompt has more tokens than the limit",
    "duplicate": "the same question stands before it",
    "conflict": "the same question has another answer elsewhere: all of them are dropped",
    "contaminated": "it overlaps with a question of an evaluation set",
    "near_heldout": "it overlaps with a held-out question",
}
"""Why a row is dropped; the first reason in this order counts."""


@dataclass(slots=True)
class _Entry:
    """What is remembered of a row between the two readings."""

    row: Row
    id: str = ""
    text: str = ""
    """The question, which is compared."""
    key: str = ""
    gold: str = ""
    """Digest of the answer."""
    kind: str = ""
    reason: str = ""
    detail: str = ""

    def drop(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail


def prepare(settings: Settings, output: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Read, check, split and write a data set.

    Args:
        settings: what and how.
        output: folder of the files; made, and files of an earlier preparation are replaced.
        say: is told about broken rows, by line.

    Returns:
        The report, as in report.json.

    Raises:
        DataError: the source or an evaluation set cannot be read, or too little is left.
    """
    sources = _sources(settings)
    check = make_check(settings)
    entries = [_examined(row, q, problem, check) for row, q, problem in _read(settings, sources)]
    if not entries:
        raise DataError(f"{settings.source}: no rows")
    for entry in [e for e in entries if e.reason == "broken"][:20]:
        say(f"{entry.row.place}: {entry.detail}")
    _drop_repeated(entries)
    _drop_overlapping(entries, _evaluation_sets(settings), settings, "contaminated")
    heldout = _heldout(entries, settings)
    apart = Overlap(settings.ngram_words, settings.overlap)
    apart.extend((e.id, e.text) for e in entries if e.id in heldout)
    for entry in entries:
        if not entry.reason and entry.id not in heldout:
            name = apart.find(entry.text)
            if name is not None:
                entry.drop("near_heldout", name)
    if not any(not e.reason and e.id not in heldout for e in entries):
        raise DataError(
            f"{settings.source}: of {len(entries)} rows none is left to train on; lower --heldout,"
            f" or see the reasons: {_counts(entries)}"
        )
    return _written(settings, sources, entries, heldout, output)


def _sources(settings: Settings) -> list[tuple[str | None, Rows]]:
    return [
        (s, open_rows(settings.source, subset=s, split=settings.split, revision=settings.revision))
        for s in settings.subsets
    ]


def _read(
    settings: Settings, sources: list[tuple[str | None, Rows]]
) -> Iterator[tuple[Row, Question | None, str]]:
    """(row, its question, why there is none) in order; the same each time."""
    for subset, rows in sources:
        prefix = "/".join(p for p in (settings.name, subset) if p)
        count = 0
        for row in rows():
            count += 1
            if row.problem:
                yield row, None, row.problem
                continue
            try:
                (question,) = questions(
                    [row.values],
                    name=row.place,
                    kind=settings.kind,
                    fields=settings.fields,
                    template="{prompt}",
                )
            except (DataError, TypeError, ValueError) as e:
                yield row, None, str(e).removeprefix(f"{row.place}: row 0: ")
                continue
            named = question.id if question.id != "0" else str(count)
            yield row, _identified(question, f"{prefix}/{named}", subset), ""


def _identified(question: Question, identity: str, subset: str | None) -> Question:
    meta = {k: v for k, v in question.meta.items() if v not in (None, "", [], {})}
    if subset:
        meta["subset"] = subset
    return Question(
        identity, question.kind, question.prompt, question.gold, meta, question.difficulty
    )


def _examined(row: Row, question: Question | None, problem: str, check: Check) -> _Entry:
    if question is None:
        return _Entry(row, reason="broken", detail=problem)
    reason, detail = check(question)
    key = " ".join(words(question.prompt)) or question.prompt.strip()
    return _Entry(
        # The values are read again when they are written: all of them may not fit into memory.
        Row(row.file, row.line),
        question.id,
        question.prompt,
        hashlib.blake2b(key.encode(), digest_size=16).hexdigest(),
        hashlib.blake2b(_plain(question).encode(), digest_size=16).hexdigest(),
        question.kind,
        reason,
        detail,
    )


def _plain(question: Question) -> str:
    """The answer without what doesn't matter; programming problems may have other tests."""
    return "" if question.kind == "code" else "".join(question.gold.split()).strip("$.")


def _drop_repeated(entries: list[_Entry]) -> None:
    """Duplicates after the first, and all of a question with several answers."""
    first: dict[str, _Entry] = {}
    answers: dict[str, set[str]] = {}
    ids: set[str] = set()
    for entry in entries:
        if not entry.reason:
            answers.setdefault(entry.key, set()).add(entry.gold)
    for entry in entries:
        if entry.reason:
            continue
        if len(answers[entry.key]) > 1:
            entry.drop("conflict", f"{len(answers[entry.key])} different answers")
        elif (before := first.setdefault(entry.key, entry)) is not entry:
            entry.drop("duplicate", before.id)
        elif entry.id in ids:
            raise DataError(f"{entry.row.place}: id {entry.id!r} belongs to another question too")
        ids.add(entry.id)


def _evaluation_sets(settings: Settings) -> list[tuple[str, str]]:
    found = []
    for wanted in settings.against:
        name, _, local = wanted.partition("=")
        for question in load_benchmark(name, local or None, plain=True):
            found.append((f"{name}/{question.id}", question.prompt))
    return found


def _drop_overlapping(
    entries: list[_Entry], others: list[tuple[str, str]], settings: Settings, reason: str
) -> None:
    if not others:
        return
    index = Overlap(settings.ngram_words, settings.overlap)
    index.extend(others)
    for entry in entries:
        if not entry.reason and (name := index.find(entry.text)) is not None:
            entry.drop(reason, name)


def _heldout(entries: list[_Entry], settings: Settings) -> set[str]:
    """The questions whose hash with the seed is lowest: rows added later move few of them."""
    kept = [e for e in entries if not e.reason]
    if settings.heldout >= len(kept):
        raise DataError(
            f"{settings.source}: {len(kept)} of {len(entries)} rows are left, {settings.heldout}"
            f" are to be held out; lower --heldout, or see the reasons: {_counts(entries)}"
        )

    def order(entry: _Entry) -> bytes:
        return hashlib.blake2b(f"{settings.seed}\0{entry.key}".encode(), digest_size=16).digest()

    return {e.id for e in sorted(kept, key=order)[: settings.heldout]}


def _counts(entries: list[_Entry]) -> str:
    counts = Counter(e.reason for e in entries if e.reason)
    return ", ".join(f"{counts[r]} {r}" for r in REASONS if counts[r]) or "nothing was dropped"


def _written(
    settings: Settings,
    sources: list[tuple[str | None, Rows]],
    entries: list[_Entry],
    heldout: set[str],
    output: Path,
) -> dict[str, Any]:
    output.mkdir(parents=True, exist_ok=True)
    work = {name: output / f".{name}.tmp" for name in FILES}
    files = {name: path.open("w", encoding="utf-8") for name, path in work.items()}
    try:
        again = _read(settings, sources)
        for entry, (row, question, _) in zip(entries, again, strict=True):
            if (row.file, row.line) != (entry.row.file, entry.row.line):
                raise DataError(f"{settings.source}: it changed while it was read: start again")
            if entry.reason:
                place = {"file": row.file, "line": row.line, "id": entry.id}
                _write(files["dropped.jsonl"], place | _why(entry))
            elif question is not None:
                name = "heldout.jsonl" if entry.id in heldout else "train.jsonl"
                _write(files[name], _prompt_row(question, settings))
    finally:
        for file in files.values():
            file.close()
    report = _report(settings, entries, heldout, {n: _sha256(p) for n, p in work.items()})
    (output / ".report.json.tmp").write_text(json.dumps(report, indent=1) + "\n")
    for name in (*FILES, "report.json"):
        os.replace(output / f".{name}.tmp", output / name)
    return report


def _write(file: Any, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _why(entry: _Entry) -> dict[str, str]:
    return {"reason": entry.reason, "detail": entry.detail}


def _prompt_row(question: Question, settings: Settings) -> dict[str, Any]:
    return {
        "id": question.id,
        "kind": question.kind,
        "prompt": worded(question, settings.template).prompt,
        "answer": question.gold,
        "difficulty": question.difficulty,
        "meta": question.meta,
    }


def _report(
    settings: Settings, entries: list[_Entry], heldout: set[str], sums: dict[str, str]
) -> dict[str, Any]:
    dropped = Counter(e.reason for e in entries if e.reason)
    told = asdict(settings)
    # Where things stand on this machine changes no byte of what is written.
    for key in ("source", "tokenizer"):
        told[key] = told[key] and Path(told[key]).name
    told["against"] = [a.partition("=")[0] for a in settings.against]
    return {
        "format": FORMAT,
        "rows": len(entries),
        "train": sum(not e.reason for e in entries) - len(heldout),
        "heldout": len(heldout),
        "dropped": {r: dropped[r] for r in REASONS},
        "settings": told,
        "sha256": sums,
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
