"""Settings of `megatron-rl data prepare`, and the check of a question that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.data.question import DataError, Question, apply_template
from megatron_rl.data.tables import Fields


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """All inputs of the written files; they are recorded in report.json."""

    source: str
    name: str
    """Prefix of the questions' ids."""
    kind: str = "math"
    fields: Fields = field(default_factory=Fields)
    subsets: tuple[str | None, ...] = (None,)
    split: str = "train"
    revision: str | None = None
    template: str | None = None
    against: tuple[str, ...] = ()
    """Evaluation sets: `name`, `name=path of a local copy`, or a .jsonl."""
    ngram_words: int = 8
    overlap: float = 0.5
    heldout: int = 1000
    tokenizer: str | None = None
    """Folder with a tokenizer.json, or the file."""
    max_tokens: int = 2048
    max_answer_kib: int = 4096
    keep_unreadable: bool = False
    seed: int = 0


def make_check(settings: PrepareSettings) -> Callable[[Question], tuple[str, str]]:
    """Make the check of a question: returns (reason, detail) to drop it, or two empty strings.

    Raises:
        DataError: `settings.tokenizer` does not exist.
    """
    count_tokens = _token_counter(settings.tokenizer)

    def check(question: Question) -> tuple[str, str]:
        kib = len(question.gold.encode()) / 1024
        if kib > settings.max_answer_kib:
            return "large", f"{kib:.0f} KiB"
        if not settings.keep_unreadable and (problem := _unreadable(question)):
            return "unreadable", problem
        tokens = count_tokens(apply_template(question, settings.template).prompt)
        return ("long", f"{tokens} tokens") if tokens > settings.max_tokens else ("", "")

    return check


def _token_counter(tokenizer: str | None) -> Callable[[str], int]:
    if tokenizer is None:
        return lambda text: 0
    from tokenizers import Tokenizer

    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"--tokenizer: {path}: no such file; give a folder with a tokenizer.json")
    loaded = Tokenizer.from_file(str(path))
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def _unreadable(question: Question) -> str:
    """Return the reason why the verifier can never accept an answer; empty if it can."""
    if question.kind == "code":
        from megatron_rl.rewards.code.cases import BadTests, read_cases
        from megatron_rl.rewards.code.code_verdict import function_name

        try:
            read_cases(question.gold, function_name(question.meta))
        except BadTests as e:
            return str(e)[:200]
    if question.kind == "math":
        from megatron_rl.rewards.math.verdict import is_readable

        return "" if is_readable(question.gold) else f"answer {question.gold[:80]!r}"
    return ""
