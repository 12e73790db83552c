r"""The value of a sentence: `Therefore $x > 5$ is the solution.`, `The largest $n$ is 34`.

A sentence is read only if it is short and has a single value, so that nothing is chosen among
several, and no word that denies or changes the value.
"""

import re

from megatron_rl.rewards.math.normalize import NOTATION

MAX_CHARACTERS, MAX_WORDS = 800, 120
"""Longest text, and the most characters of it in words."""
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
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


def value_in_sentence(text: str, *, declared: bool) -> str | None:
    """Return the only value in a sentence; None if the text is no such sentence.

    If it is `declared` to be the answer, the value may stand anywhere: "Jane began 3 hours ago".
    """
    text = text.strip()
    if len(text) > MAX_CHARACTERS or " " not in text or _WORD.search(text) is None:
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
