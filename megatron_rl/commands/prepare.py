"""`megatron-rl data prepare`: from a data set to checked, decontaminated, split prompts.

Written into the output folder, UTF-8 with one JSON object per line; the same input gives the same
bytes:

    train.jsonl, heldout.jsonl   {"id", "kind", "prompt", "answer", "difficulty", "meta"}
    dropped.jsonl                {"file", "line", "id", "reason", "detail"}
    report.json                  counts by reason, settings, SHA-256 of the other three

`train.jsonl` is a task of kind `jsonl`: its prompts are complete (if made with `--template`, set
`template: "{prompt}"` there). The files are written into a temporary folder and moved at the end.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from megatron_rl.commands.convert.resumable import file_sum
from megatron_rl.data.overlap import Overlap, words
from megatron_rl.data.prompt_format import read_format
from megatron_rl.data.published import TRAINING_SETS, DataSet
from megatron_rl.data.question import DataError, Question, apply_template, unreadable
from megatron_rl.data.tables import Fields, Source, make_question, read_rows
from megatron_rl.files import naming_full_disk
from megatron_rl.rewards.math import verify

app = typer.Typer(name="data", no_args_is_help=True, help="Prompt sets: prepare one.")
app.callback()(lambda: None)  # without a callback Typer makes a sole command the whole program

SOURCE = "polaris, deepcoder, another data set's name on the hub, a file or a folder."
OUTPUT = "Folder for train.jsonl, heldout.jsonl, dropped.jsonl, report.json."
LOCAL = "Local copy to read instead of the hub: file or folder."
KIND = "Verifier: math, code, exact, custom; default: math."
SUBSET = "Configuration on the hub. Can be repeated."
AGAINST = (
    "Evaluation set to decontaminate against: aime2024, aime2025, math500, livecodebench,"
    " NAME=PATH of a local copy, or a .jsonl. Can be repeated."
)
OVERLAP = "Share of common n-grams from which two questions overlap."
TOKENIZER = "Folder with a tokenizer.json, for --max-tokens."
FILES = ("train.jsonl", "heldout.jsonl", "dropped.jsonl")
REASONS = {
    "broken": "the row is not a JSON object, lacks question or answer, or has another verifier",
    "unreadable": "the verifier cannot read the answer, or the tests",
    "large": "the answer, or the tests, exceed the limit",
    "long": "the prompt has more tokens than the limit",
    "duplicate": "the same question occurs before it",
    "conflict": "the same question has another answer elsewhere: all of them are dropped",
    "contaminated": "it overlaps with a question of an evaluation set",
    "near_heldout": "it overlaps with a held-out question",
}
"""Reasons to drop a row; the first one in this order counts."""
MAX_WARNINGS = 20


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """All inputs of the written files; they are recorded in report.json."""

    source: str
    name: str  # prefix of the questions' ids
    kind: str = "math"
    fields: Fields = field(default_factory=Fields)
    subsets: tuple[str | None, ...] = (None,)
    split: str = "train"
    revision: str | None = None
    template: str | None = None
    against: tuple[str, ...] = ()  # evaluation sets: `name`, `name=path of a copy`, or a .jsonl
    ngram_words: int = 8
    overlap: float = 0.5
    heldout: int = 1000
    tokenizer: str | None = None  # folder with a tokenizer.json, or the file
    max_tokens: int = 2048
    max_answer_kib: int = 4096
    seed: int = 0


@dataclass(slots=True)
class _Entry:
    """The facts about a row that decide where it goes."""

    file: str
    line: int
    id: str = ""
    text: str = ""  # the question
    key: str = ""  # digest of the question's words: equal for duplicates
    kind: str = ""  # the verifier
    gold: str = ""  # the answer; empty for programs, whose copies may have different tests
    reason: str = ""
    detail: str = ""

    def drop(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail


@app.command("prepare")
def prepare_command(
    source: Annotated[str, Argument(help=SOURCE)],
    output: Annotated[Path, Argument(help=OUTPUT)],
    local: Annotated[Path | None, Option(help=LOCAL)] = None,
    kind: Annotated[str | None, Option(help=KIND)] = None,
    subset: Annotated[list[str] | None, Option(help=SUBSET)] = None,
    split: Annotated[str | None, Option(help="Split; default: train.")] = None,
    revision: Annotated[str | None, Option(help="Commit on the hub; pin it.")] = None,
    prompt_field: Annotated[str, Option(help="Field of the question.")] = "",
    answer_field: Annotated[str, Option(help="Field of answer or tests.")] = "",
    template: Annotated[str | None, Option(help="Text of a prompt with {prompt}.")] = None,
    against: Annotated[list[str] | None, Option(help=AGAINST)] = None,
    ngram_words: Annotated[int, Option(min=2, help="Words of an n-gram.")] = 8,
    overlap: Annotated[float, Option(help=OVERLAP)] = 0.5,
    heldout: Annotated[int, Option(min=0, help="Held-out questions.")] = 1000,
    tokenizer: Annotated[str | None, Option(help=TOKENIZER)] = None,
    max_tokens: Annotated[int, Option(min=1, help="Longest prompt [tokens].")] = 2048,
    max_answer_kib: Annotated[int, Option(min=1, help="Longest answer or tests.")] = 4096,
    seed: Annotated[int, Option(help="Seed of the held-out split.")] = 0,
) -> None:
    """Make a prompt set: checked, without duplicates, decontaminated, with a held-out split.

    The same input gives the same bytes. Dropped rows are in dropped.jsonl, with line and reason.
    """
    known = TRAINING_SETS.get(source, DataSet(source))
    prompt, gold = prompt_field or known.fields.prompt, answer_field or known.fields.gold
    settings = PrepareSettings(
        source=str(local or known.source),
        name=source if source in TRAINING_SETS else Path(source).stem,
        kind=kind or known.kind,
        fields=replace(known.fields, prompt=prompt, gold=gold),
        subsets=tuple(subset) if subset else known.subsets,
        split=split or known.split,
        revision=revision,
        template=template,
        against=tuple(against or ()),
        ngram_words=ngram_words,
        overlap=overlap,
        heldout=heldout,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        max_answer_kib=max_answer_kib,
        seed=seed,
    )
    try:
        report = prepare(settings, output)
    except DataError as e:
        print(f"megatron-rl data prepare: {e}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"{report['rows']} rows: {report['train']} to train on, {report['heldout']} held out")
    for reason, count in report["dropped"].items():
        if count:
            print(f"  {count} dropped, {reason}: {REASONS[reason]}")
    print(f"in {output}: train.jsonl, heldout.jsonl, dropped.jsonl (by line), report.json")


def prepare(settings: PrepareSettings, output: Path) -> dict[str, Any]:
    """Read, check, split and write a data set; return the report, as in report.json.

    Files in `output` are replaced; the first broken rows are named on standard error.

    Raises:
        DataError: the source or an evaluation set cannot be read, or too little is left.
    """
    if settings.template is not None and "{prompt}" not in settings.template:
        raise DataError(f"--template is {settings.template!r}: it must have {{prompt}} in it")
    if not 0 < settings.overlap <= 1:
        raise DataError(f"--overlap is {settings.overlap:g}: it must be above 0 and at most 1")
    output.mkdir(parents=True, exist_ok=True)
    with (
        naming_full_disk(output),
        tempfile.TemporaryDirectory(dir=output, prefix=".prepare-") as folder,
    ):
        work = Path(folder)
        entries = _read(settings, work / "all.jsonl")
        report = _write(settings, entries, _select(settings, entries), work)
        for name in (*FILES, "report.json"):
            os.replace(work / name, output / name)
    return report


def _read(settings: PrepareSettings, path: Path) -> list[_Entry]:
    """Examine every row; write one line for each to `path`, its prompt or an empty line.

    Prompts stay on disk because the tests of programming problems may not fit into memory.
    """
    check = _make_check(settings)
    entries: list[_Entry] = []
    with path.open("w", encoding="utf-8") as file:
        for subset in settings.subsets:
            prefix = "/".join(p for p in (settings.name, subset) if p)
            source = Source(settings.source, subset, settings.split, settings.revision)
            for count, row in enumerate(read_rows(source), start=1):
                entry = _Entry(row.file, row.line)
                entries.append(entry)
                try:
                    question = make_question(row, str(count), settings.kind, settings.fields)
                except DataError as e:
                    entry.drop("broken", str(e))
                else:
                    meta = {k: v for k, v in question.meta.items() if v not in (None, "", [], {})}
                    meta |= {"subset": subset} if subset else {}
                    q = replace(question, id=f"{prefix}/{question.id}", meta=meta)
                    entry.id, entry.text = q.id, q.prompt
                    entry.key = _digest(" ".join(words(q.prompt)) or q.prompt.strip())
                    entry.kind, entry.gold = q.kind, "" if q.kind == "code" else q.gold.strip()
                    entry.drop(*check(q))
                    if not entry.reason:
                        q = apply_template(q, settings.template)
                        names = {"id": q.id, "kind": q.kind, "prompt": q.prompt, "answer": q.gold}
                        rest = {"difficulty": q.difficulty, "meta": q.meta}
                        file.write(json.dumps(names | rest, ensure_ascii=False))
                file.write("\n")
    if not entries:
        raise DataError(f"{settings.source}: no rows")
    for entry in [e for e in entries if e.reason == "broken"][:MAX_WARNINGS]:
        print(f"{entry.file}:{entry.line}: {entry.detail}", file=sys.stderr)
    return entries


def _select(settings: PrepareSettings, entries: list[_Entry]) -> set[str]:
    """Drop repeated and overlapping questions; return the ids of the held-out ones."""
    _drop_repeated(entries)
    benchmarks = Overlap(settings.ngram_words, settings.overlap)
    benchmarks.add_benchmarks(settings.against)
    _drop_overlapping(entries, benchmarks, "contaminated")
    kept = [e for e in entries if not e.reason]
    if settings.heldout >= len(kept):
        raise DataError(
            f"{settings.source}: {len(kept)} of {len(entries)} rows are left, {settings.heldout}"
            f" are to be held out; lower --heldout, or see the reasons: {_counts(entries)}"
        )
    # The lowest hashes with the seed: rows that are added later change few of them.
    ordered = sorted(kept, key=lambda e: _digest(f"{settings.seed}\0{e.key}"))
    heldout = {e.id for e in ordered[: settings.heldout]}
    questions = Overlap(settings.ngram_words, settings.overlap)
    for entry in kept:
        if entry.id in heldout:
            questions.add(entry.id, entry.text)
    train = [e for e in kept if e.id not in heldout]
    _drop_overlapping(train, questions, "near_heldout")
    if all(e.reason for e in train):
        raise DataError(
            f"{settings.source}: of {len(entries)} rows none is left to train on; lower --heldout,"
            f" or see the reasons: {_counts(entries)}"
        )
    return heldout


def _drop_repeated(entries: list[_Entry]) -> None:
    """Drop duplicates after the first, and all copies of a question with several answers."""
    copies: defaultdict[str, list[_Entry]] = defaultdict(list)
    for entry in entries:
        if not entry.reason:
            copies[entry.key].append(entry)
    first_by_id: dict[str, _Entry] = {}
    for first, *others in copies.values():
        for entry in others:
            entry.drop("duplicate", first.id)
        if other := next((e.gold for e in others if not _same_answer(first, e)), ""):
            for entry in (first, *others):
                entry.drop("conflict", f"{first.gold[:80]} and {other[:80]}")
        elif first_by_id.setdefault(first.id, first) is not first:
            problem = f"id {first.id!r} belongs to another question too"
            raise DataError(f"{first.file}:{first.line}: {problem}")


def _same_answer(a: _Entry, b: _Entry) -> bool:
    if a.gold == b.gold or a.kind != "math" or b.kind != "math":
        return a.gold == b.gold
    return verify(a.gold, b.gold).passed or verify(b.gold, a.gold).passed


def _drop_overlapping(entries: list[_Entry], index: Overlap, reason: str) -> None:
    for entry in entries:
        if not entry.reason and (match := index.find(entry.text)) is not None:
            entry.drop(reason, match)


def _counts(entries: list[_Entry]) -> str:
    counts = Counter(e.reason for e in entries if e.reason)
    return ", ".join(f"{counts[r]} {r}" for r in REASONS if counts[r]) or "nothing was dropped"


def _write(
    settings: PrepareSettings, entries: list[_Entry], heldout: set[str], work: Path
) -> dict[str, Any]:
    """Distribute the lines of all.jsonl, and write the report."""
    train, held, dropped = ((work / name).open("w", encoding="utf-8") for name in FILES)
    with train, held, dropped, (work / "all.jsonl").open(encoding="utf-8", newline="\n") as lines:
        for entry, line in zip(entries, lines, strict=True):
            if entry.reason:
                row = {n: getattr(entry, n) for n in ("file", "line", "id", "reason", "detail")}
                dropped.write(json.dumps(row, ensure_ascii=False) + "\n")
            else:
                (held if entry.id in heldout else train).write(line)
    reasons = Counter(e.reason for e in entries)
    values = asdict(settings)
    # Paths of this machine must not change the bytes.
    for key in ("source", "tokenizer"):
        values[key] = values[key] and Path(values[key]).name
    values["against"] = [a.partition("=")[0] for a in settings.against]
    report = {
        "format": "megatron_rl.prompts/1",
        "rows": len(entries),
        "train": reasons[""] - len(heldout),
        "heldout": len(heldout),
        "dropped": {reason: reasons[reason] for reason in REASONS},
        "settings": values,
        "sha256": {name: file_sum(work / name) for name in FILES},
    }
    (work / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _make_check(settings: PrepareSettings) -> Callable[[Question], tuple[str, str]]:
    """Make the check of a question: returns (reason, detail) to drop it, or two empty strings."""
    tokenizer = None
    if settings.tokenizer is not None:
        from tokenizers import Tokenizer

        path = Path(settings.tokenizer)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise DataError(f"--tokenizer: no {path}; give a folder with a tokenizer.json")
        tokenizer, form = Tokenizer.from_file(str(path)), read_format(path.parent, "<think>")

    def check(question: Question) -> tuple[str, str]:
        if (kib := len(question.gold.encode()) / 1024) > settings.max_answer_kib:
            return "large", f"{kib:.0f} KiB"
        if problem := unreadable(question):
            return "unreadable", problem
        if tokenizer is not None:
            text = form(apply_template(question, settings.template).prompt)
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            if len(tokens) > settings.max_tokens:
                return "long", f"{len(tokens)} tokens"
        return "", ""

    return check
