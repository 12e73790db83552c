"""Which part of a completion is the answer: the last box after thinking."""

from __future__ import annotations

import re

from megatron_rl.rewards.math.node import MAX_CHARACTERS, OverLimit

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
# A run of escapes is one step.
_BRACE = re.compile(r"(?:\\.)+|[{}]", re.DOTALL)
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[^\s\\{}]")
_DOLLARS = re.compile(r"^(?:\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\])$", re.DOTALL)
_SENTENCE = re.compile(r"\banswer\s*(?:is|=|:)\s*:?", re.IGNORECASE)
MAX_NESTED_BOXES = 10
MAX_BRACES, MAX_BRACE_DEPTH = 4096, 200
"""Of one box. No formula that can be read has as many."""


class NoAnswer(ValueError):
    """There is no answer in the text; the message says why."""


def after_thinking(text: str, think_end: str, *, required: bool) -> str:
    """The text after the first `think_end`.

    Args:
        required: without the marker there is no answer; else the whole text is the answer, unless
            it opens thinking (`<think>`) and never ends it.

    Raises:
        NoAnswer: thinking did not end.
    """
    _, ended, tail = text.partition(think_end)
    if ended:
        return tail
    if required or think_end.replace("/", "") in text:
        raise NoAnswer("thinking did not end")
    return text


def last_box(text: str) -> str | None:
    r"""Content of the last outermost `\boxed{...}`; None without a box. Inner boxes are unwrapped.

    Raises:
        NoAnswer: the last box is not closed, or empty.
        OverLimit: a box with too many braces.
    """
    content, position = None, 0
    while (match := _BOX.search(text, position)) is not None:
        start = match.end()
        if text[start : start + 1] == "{":
            end = _closing(text, start)
            if end is None:
                raise NoAnswer("the last box is not closed")
            content, position = text[start + 1 : end], end + 1
        elif (token := _TOKEN.match(text, start)) is not None:
            content, position = token.group(), token.end()
        else:
            content, position = "", max(start, match.start() + 1)
    if content is None:
        return None
    # A text that is too long to be read is not searched for more boxes either.
    inner = unbox(content) if len(content) <= MAX_CHARACTERS else content
    if not inner.strip():
        raise NoAnswer("the last box is empty")
    return inner


def unbox(text: str) -> str:
    r"""The text without `\boxed{` and its brace, wherever a box stands in it."""
    out, position = [], 0
    for _ in range(MAX_NESTED_BOXES):
        match = _BOX.search(text, position)
        if match is None:
            break
        out.append(text[position : match.start()])
        position = match.end()
        if text[position : position + 1] == "{":
            end = _closing(text, position)
            if end is None:
                raise NoAnswer("a box inside the last box is not closed")
            text = f"{text[:position]} {text[position + 1 : end]} {text[end + 1 :]}"
    out.append(text[position:])
    return "".join(out)


def _closing(text: str, start: int) -> int | None:
    """Index of the brace that closes the one at `start`; escaped braces don't count.

    Raises:
        OverLimit: too many braces, or nested too deep.
    """
    first = text.find("}", start)
    if first < 0:
        return None
    # Without a brace or an escape between them (a number of any length) there is nothing to scan.
    if text.find("{", start + 1, first) < 0 and text.find("\\", start, first) < 0:
        return first
    depth = 0
    for count, match in enumerate(_BRACE.finditer(text, start)):
        if count > MAX_BRACES or depth > MAX_BRACE_DEPTH:
            raise OverLimit(
                f"a box with over {MAX_BRACES} braces, or nested over {MAX_BRACE_DEPTH} deep"
            )
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


def bare_answer(text: str) -> str:
    """The answer in a text without a box: after "answer is", else the whole text; no dollars.

    Raises:
        NoAnswer: the text is empty.
    """
    start = 0
    for match in _SENTENCE.finditer(text):
        start = match.end()
    answer = strip_math_delimiters(text[start:])
    if not answer:
        raise NoAnswer("the answer is empty")
    return answer


def strip_math_delimiters(text: str) -> str:
    r"""Without a pair of `$`, `$$`, `\(`, `\[` around all of it, and without a final full stop."""
    text = text.strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    if (match := _DOLLARS.match(text)) is not None:
        inside = next(g for g in match.groups() if g is not None)
        # `$1$ and $2$` is two pieces, and `\$5` is money.
        if not re.search(r"(?<!\\)\$|\\[()\[\]]", inside) and not inside.endswith("\\"):
            return strip_math_delimiters(inside)
    return text


def extract_answer(text: str, think_end: str, *, boxed: bool, ended_thinking: bool) -> str:
    """The answer of a completion.

    Args:
        boxed: only a box is an answer; else a text without a box is one as a whole.
        ended_thinking: the completion must contain `think_end`.

    Raises:
        NoAnswer: with the reason.
    """
    tail = after_thinking(text, think_end, required=ended_thinking)
    content = last_box(tail)
    if content is not None:
        return strip_math_delimiters(content)
    if boxed:
        raise NoAnswer("no \\boxed{...} in the answer")
    return bare_answer(tail)
