"""The answer in a completion: the last box after thinking."""

import re

from megatron_rl.rewards.math.node import MAX_CHARACTERS, OverLimit
from megatron_rl.rewards.math.normalize import NOTATION

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
# A run of escapes is one match.
_BRACE = re.compile(r"(?:\\.)+|[{}]", re.DOTALL)
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[^\s\\{}]")
_DOLLARS = re.compile(r"^(?:\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\])$", re.DOTALL)
_SENTENCE = re.compile(r"\banswer\s*(?:(?:is|=|:)\s*:?(?:\*\*(?=\s))?|\*\*(?=\s))", re.IGNORECASE)
# A bullet has a space behind it.
_MINUS = re.compile(r"(?:^|[\s=$(])-\$?$")
_GAP = r"(?:[\s$~]|\\q?quad(?![A-Za-z])|\\[ ,;:()\[\]])*"
_WORDS = r"(?:for part \(?\w\)?|[a-z]{3,})"
# \boxed{5} and y = \boxed{6}; \boxed{1} paper and \boxed{2} bins; nothing at all.
_JOINED = re.compile(
    rf"{_GAP}(?:,\s*(?:and|or)?|;|(?:\\text\{{)?\s*(?:{_WORDS} and|(?:and|or)\b)\s*\}}?){_GAP}"
    rf"(?:[A-Za-z]\w*\s*={_GAP})?|"
)
# What follows the answer in the prompts of Minerva, and turns of a chat that were not cut off.
_TAIL = re.compile(
    r"(?is)(?:\bI hope (?:it|this) is correct\b|<\|(?:[a-z]+_[a-z_]+|endoftext)\|>).*$"
)
MAX_NESTED_BOXES = 10
MAX_BRACES, MAX_BRACE_DEPTH = 4096, 200  # limits of one box, beyond any formula that can be parsed

MAX_SENTENCE, MAX_WORDS = 800, 120
"""Longest text that is read as a sentence, and the most characters of it in words."""
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_SPOKEN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_DENIED = frozenset(f"{NOTATION['operations']} {NOTATION['denials']}".split()) - frozenset(
    # These say what the value is of, and change nothing that stands behind "is".
    ("to", "for", "when", "where", "with", "set", "pair", "point")
)
_VALUE = re.compile(r"[\d=<>]|\\(?:le|ge|lt|gt|ne|in|infty|pi|sqrt|frac|begin)")
_VERB = re.compile(r"(?i)(?<![A-Za-z])(?:is|are|equals|equal to)(?![A-Za-z])|:(?=\s)")
_BEFORE = re.compile(
    r"(?i)(?:(?<![A-Za-z])(?:is|are|equals|equal to|answer|so|thus|hence|therefore|that)|:),?\s*$"
)
_AFTER = re.compile(
    r"(?i)\s*(?:is\s+(?:the|our|my)\s+(?:final\s+)?(?:answer|solution|result))?\s*[.!]?\s*"
)
_COUNTED = re.compile(r"[^\d.]*(?<![\w-])(-?\d[\d,]*(?:\.\d+)?(?:\s+[a-z]+)?)\b[^\d.;?!]*\.?\s*")


class NoAnswer(ValueError):
    """There is no answer in the text; the message says why."""


def after_thinking(text: str, think_end: str, *, required: bool) -> str:
    """Return the text after the first `think_end`.

    Without the marker, unless it is `required`, a text that does not start thinking (`<think>`) is
    returned as a whole. Raises `NoAnswer` if thinking did not end.
    """
    head, ended, tail = text.partition(think_end)
    if not ended and (required or think_end.replace("/", "") in text):
        raise NoAnswer("thinking did not end")
    return tail if ended else head


def last_box(text: str) -> str | None:
    r"""Return the content of the last outermost `\boxed{...}`, inner boxes unwrapped, or None.

    Raises `NoAnswer` if the last box is not closed, or empty.
    """
    content, position = None, 0
    boxes: list[tuple[int, str, int]] = []  # start, content, end
    while (match := _BOX.search(text, position)) is not None:
        start = match.end()
        if text[start : start + 1] == "{":
            if (end := _closing(text, start)) is None:
                raise NoAnswer("the last box is not closed")
            content, position = text[start + 1 : end], end + 1
        elif (token := _TOKEN.match(text, start)) is not None:
            content, position = token.group(), token.end()
        else:
            content, position = "", max(start, match.start() + 1)
        boxes.append((match.start(), content, position))
    if content is None:
        return None
    # A text that is too long to be parsed is not searched for more boxes either.
    inner = unbox(content) if len(content) <= MAX_CHARACTERS else content
    if not inner.strip():
        raise NoAnswer("the last box is empty")
    parts, start = [inner], boxes[-1][0]
    for first, content, end in boxes[-2 : -2 - MAX_NESTED_BOXES : -1]:
        # x = \boxed{5} and y = \boxed{6} are one answer.
        if start - end > 40 or not _JOINED.fullmatch(text, end, start):
            break
        parts, start = [content, *parts], first
    if len(parts) == 1 and len(inner) <= MAX_CHARACTERS and _MINUS.search(text[:start][-3:]):
        return f"-{inner}" if inner[0].isalnum() and inner.isalnum() else f"-({inner})"
    return ", ".join(dict.fromkeys(parts))


def unbox(text: str) -> str:
    r"""Remove every `\boxed{` and its closing brace from a text."""
    out, position = [], 0
    for _ in range(MAX_NESTED_BOXES):
        if (match := _BOX.search(text, position)) is None:
            break
        out.append(text[position : match.start()])
        position = match.end()
        if text[position : position + 1] == "{":
            if (end := _closing(text, position)) is None:
                raise NoAnswer("a box inside the last box is not closed")
            text = f"{text[:position]} {text[position + 1 : end]} {text[end + 1 :]}"
    out.append(text[position:])
    return "".join(out)


def _closing(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the one at `start`, escaped braces ignored."""
    first = text.find("}", start)
    if first < 0:
        return None
    # Nothing to scan without a brace or an escape between them (a number of any length).
    if text.find("{", start + 1, first) < 0 and text.find("\\", start, first) < 0:
        return first
    depth = 0
    for count, match in enumerate(_BRACE.finditer(text, start)):
        if count > MAX_BRACES or depth > MAX_BRACE_DEPTH:
            raise OverLimit(
                f"a box with over {MAX_BRACES} braces, or nested over {MAX_BRACE_DEPTH} deep"
            )
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return match.start()
    return None


def bare_answer(text: str) -> str:
    """Return the answer in a text without a box: what it declares, or else the whole text.

    A declaration is the last "answer is", and a short sentence with a single value.
    """
    if "<|" in text or "I hope" in text:
        text = _TAIL.sub("", text)
    *before, text = _SENTENCE.split(text)
    text = _value_in_sentence(text, declared=bool(before)) or text
    if not (answer := strip_math_delimiters(text)):
        raise NoAnswer("the answer is empty")
    return answer


def _value_in_sentence(text: str, *, declared: bool) -> str | None:
    r"""Return the only value in a sentence: 34 in `The largest $n$ is 34`; None for other texts.

    A sentence is read only if it is short and has a single value, so that nothing is chosen among
    several, and no word that denies or changes the value. If it is `declared` to be the answer, the
    value may stand anywhere: "Jane began 3 hours ago".
    """
    text = text.strip()
    if len(text) > MAX_SENTENCE or " " not in text or _SPOKEN.search(text) is None:
        return None
    formulas, words = list(_FORMULA.finditer(text)), _FORMULA.sub(" ", text)
    if len(words) > MAX_WORDS:
        return None
    spoken = re.findall("[a-z]+", words.casefold())
    if not max(map(len, spoken), default=0) > 1 or not _DENIED.isdisjoint(spoken):
        return None
    values = [f for f in formulas if _VALUE.search(f[0])]
    digits = re.search(r"\d", words) is not None
    if len(values) + digits != 1:
        return None
    if values:
        before, after = text[: values[0].start()], text[values[0].end() :]
        return values[0][0] if _BEFORE.search(before) and _AFTER.fullmatch(after) else None
    *_, verb = [None, *_VERB.finditer(text)]
    if verb is not None and not re.search(r"\d", text[: verb.start()]):
        return text[verb.end() :]
    counted = _COUNTED.fullmatch(text) if declared else None
    return counted and counted[1]


def strip_math_delimiters(text: str) -> str:
    r"""Remove a pair of `$`, `$$`, `\(`, `\[` around the text, and a final period."""
    text = text.strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    if (match := _DOLLARS.match(text)) is not None:
        inside = next(g for g in match.groups() if g is not None)
        # `$1$ and $2$` is not one formula, and `\$5` is money.
        if not re.search(r"(?<!\\)\$|\\[()\[\]]", inside) and not inside.endswith("\\"):
            return strip_math_delimiters(inside)
    return text


def extract_answer(text: str, think_end: str, *, boxed: bool, ended_thinking: bool) -> str:
    """Return the answer of a completion after `think_end`; `NoAnswer` if there is none.

    Without a box the text is itself the answer, unless it must be `boxed`.
    """
    tail = after_thinking(text, think_end, required=ended_thinking)
    if (content := last_box(tail)) is not None:
        return strip_math_delimiters(content)
    if boxed:
        raise NoAnswer("no \\boxed{...} in the answer")
    return bare_answer(tail)
