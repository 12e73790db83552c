"""Check of a single question: its answer is readable, its prompt is short enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_rl.commands.prepare.prepare_settings import PrepareSettings
from megatron_rl.data.question import DataError, Question, apply_template


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
