"""Whether a single question can be trained on: its answer is read, its prompt is short enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_rl.commands.prepare.prepare_settings import Settings
from megatron_rl.data.question import DataError, Question, worded

Check = Callable[[Question], tuple[str, str]]
"""(reason, detail) for which a question is dropped; two empty texts if it is not."""


def make_check(settings: Settings) -> Check:
    """The checks of single questions.

    Raises:
        DataError: no tokenizer where the settings say.
    """
    count = _token_counter(settings)

    def check(question: Question) -> tuple[str, str]:
        kib = len(question.gold.encode()) / 1024
        if kib > settings.max_answer_kib:
            return "large", f"{kib:.0f} KiB"
        problem = "" if settings.keep_unreadable else _unreadable(question)
        if problem:
            return "unreadable", problem
        tokens = count(worded(question, settings.template).prompt)
        return ("long", f"{tokens} tokens") if tokens > settings.max_tokens else ("", "")

    return check


def _token_counter(settings: Settings) -> Callable[[str], int]:
    if settings.tokenizer is None:
        return lambda text: 0
    from tokenizers import Tokenizer

    path = Path(settings.tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"--tokenizer: {path}: no such file; give a folder with a tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _unreadable(question: Question) -> str:
    """Why the verifier of a question could never say `correct`; empty if it could."""
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
