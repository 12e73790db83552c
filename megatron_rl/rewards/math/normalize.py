r"""One spelling for equal texts: unicode, spacing, `\left`, `\dfrac`, plain `pi/2`."""

import re
from importlib import resources
from itertools import batched
from typing import Any

import yaml

from megatron_rl.rewards.math.node import FUNCTIONS

NOTATION: dict[str, Any] = yaml.safe_load(
    (resources.files(__package__) / "notation.yaml").read_text("utf-8")
)
"""The tables of `notation.yaml`."""
_UNICODE = {
    **dict.fromkeys("−–—‒﹣", "-"),
    **dict.fromkeys("\xa0\u2009\u202f\u200b\u2002\u2003\u3000\t\n\r", " "),
    "∛": "\\sqrt[3] ",
    "°": "^\\circ ",
    # Full-width signs, digits and letters.
    **{chr(c): chr(c - 0xFEE0) for c in range(0xFF01, 0xFF5F)},
    "％": "\\%",
    # A command that ends in a letter needs a space.
    **{k: f"{v} " if v[-1].isalpha() else v for k, v in batched(NOTATION["symbols"].split(), 2)},
}
_TABLE = str.maketrans(_UNICODE)
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_ROOT = re.compile(r"√\s*(\d+)")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

_GROUPS = [group.split() for group in NOTATION["spellings"].split(";")]
_RENAMES = {name: first for first, *names in _GROUPS for name in names}
_DROPPED = frozenset(NOTATION["dropped"].split())
_REWRITES = [(re.compile(pattern), new) for pattern, new in NOTATION["rewrites"]]
_MULTIPLIERS = [(re.compile(pattern), new) for pattern, new in NOTATION["multipliers"]]
_PLAIN_MATH = [(re.compile(pattern), new) for pattern, new in NOTATION["plain"]]
_UNITS = {name: n for n, name in enumerate(NOTATION["numbers"].split())}
_UNITS |= {name: 10 * n for n, name in enumerate(NOTATION["tens"].split(), 2)}
MAX_REWRITTEN = 500  # longer texts are no words around a value
# Formulas that no rewrite changes.
_PLAIN = re.compile(
    r"(?:[-+/^=<>()\[\],|!\d{}]|\.(?!\.)|(?<=,)\s(?!\s)|\s(?![\d\s])|\\(?:frac|sqrt|pi|left|right|cdot|times)(?![A-Za-z])"
    r"|(?<![A-Za-z])[a-z](?![A-Za-z]))*"
)
_EMPTY_TEXT = re.compile(r"\\text[a-z]*\s*\{\s*\}")
# \\begin ... \\end: every backslash was escaped.
_DOUBLED = re.compile(r"(?:[^\\]|\\\\)*\\\\[A-Za-z]{2}(?:[^\\]|\\\\)*")
_FILLERS = frozenset(NOTATION["fillers"])
_POWERS: dict[str, int] = NOTATION["powers"]
_NUMBER = re.compile(
    rf"(?i)(?<![A-Za-z\\])(?:{'|'.join(sorted(_UNITS, key=len, reverse=True))})\b"
    rf"(?:(?:\s+and)?[\s-]+(?:{'|'.join([*sorted(_UNITS, key=len, reverse=True), *_POWERS])})\b)*"
)
_TEXT_COMMANDS = (
    r"text|textrm|textbf|textit|textnormal|textsf|textup|mathrm|operatorname\*?|mbox|hbox|emph"
)
_COMMAND = re.compile(r"\\([A-Za-z]+)")
# A line break \\ separates the rows of a matrix; at the end it is dropped.
_SPACES = re.compile(r"(\\\\)(?!\s*$)|\\[,;:! ]|~|\\\\|\s+")
_STYLE = re.compile(r"\\(?:hspace|vspace|phantom|hphantom|vphantom)\*?\{[^{}]*\}")
_E_ROMAN = re.compile(
    rf"\\(?:{_TEXT_COMMANDS})\s*\{{\s*([eidx])\s*\}}|\\(?:mathrm|rm)\s+([eid])(?![A-Za-z])"
)
_NAMED = re.compile(
    # 5\text{ min} is a time.
    rf"\\(?:{_TEXT_COMMANDS})\s*\{{\s*({'|'.join(FUNCTIONS)})\s*\}}(?<!min\}})(?!\s*$)"
)


def rewrite(text: str) -> str:
    r"""Apply the rewrites of `notation.yaml` and write numbers in digits.

    Example: `\textbf{Answer: } twenty-one` becomes `21`, `5\text{ million}` has a power of ten.
    """
    text = text.rpartition("####")[2].strip()
    if len(text) > MAX_REWRITTEN or _PLAIN.fullmatch(text):
        return text
    if "\\\\" in text and _DOUBLED.fullmatch(text):
        text = text.replace("\\\\", "\\")
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    text = _NUMBER.sub(_digits, text)
    for pattern, new in _MULTIPLIERS:
        text = pattern.sub(new, text)
    return _EMPTY_TEXT.sub(" ", text)


def _digits(match: re.Match[str]) -> str:
    """Return the words of a number in digits; several numbers one by one."""
    total, current, last = 0, 0, 100
    for word in re.split(r"\s+and[\s-]+|[\s-]+", match[0].lower()):
        value, power = _UNITS.get(word), _POWERS.get(word, 0)
        if value is not None and (last >= 100 or (last in range(20, 100, 10) and 0 < value < 10)):
            current, last = current + value, value
        elif value is None and power > 1 and current:
            # two hundred and five thousand: hundreds are part of the thousands
            current, last = current * 10**power, 10**power
            if power > 2:
                total, current = total + current, 0
        else:
            return re.sub("[A-Za-z]+", lambda m: str(_UNITS.get(m[0].lower(), m[0])), match[0])
    return str(total + current)


def clean(text: str) -> str:
    r"""Return LaTeX in the one spelling that the parser accepts.

    Example: `\left( \dfrac{1}{2},\, 3 \right)` becomes `( \frac {1}{2}, 3 )` up to spaces.
    """
    text = _SUPERSCRIPT.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _SUBSCRIPT.sub(lambda m: f"_{{{m[0].translate(_SUBSCRIPTS)}}}", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = text.translate(_TABLE)
    text = text.replace("\\not=", "\\ne ").replace("\\not =", "\\ne ")
    text = text if "\\$" in text else text.replace("$", "")
    text = text.replace("\\!", "")
    if "\\" in text:
        text = _STYLE.sub(" ", text)
        text = _E_ROMAN.sub(lambda m: f" {m[1] or m[2]} ", text)
        text = _NAMED.sub(lambda m: f"\\{m[1]} ", text)
        text = _COMMAND.sub(_rename, text)
    return _SPACES.sub(lambda m: m[1] or " ", text).strip()


def _rename(match: re.Match[str]) -> str:
    name = match[1]
    if name in _DROPPED:
        return " "
    new = str(_RENAMES.get(name, name))
    return new if new in "<>:[]()" else f"\\{new}"


def plain_to_latex(text: str) -> str:
    r"""Translate plain-text mathematics to LaTeX: `sqrt(2)*pi/2`, `x**2`, `>=`.

    LaTeX and the words in `\text{...}` remain as they are.
    """
    parts = _ANY_TEXT.split(text)
    for pattern, new in _PLAIN_MATH:
        parts[::2] = [pattern.sub(new, part) for part in parts[::2]]
    return "".join(parts)


_ANY_TEXT = re.compile(rf"(\\(?:{_TEXT_COMMANDS})\s*\{{[^{{}}]*\}})")
_TEXT = re.compile(rf"\\(?:{_TEXT_COMMANDS})\s*(?:\{{([^{{}}]*)\}}|(?=\s))")
_TEXT_NAME = re.compile(
    rf"\\(?:{_TEXT_COMMANDS})\s*\{{([^{{}}A-Za-z]*|\s*,?\s*(?:and|or|[a-z]|[A-Z]+)\s*)\}}"
)


def untext(text: str, *, words: bool = True) -> str:
    r"""Replace `\text{...}` by its words, with a space on both sides.

    Without `words`, only numbers, names such as `AB`, and "and" and "or" are replaced.
    """
    pattern = _TEXT if words else _TEXT_NAME
    return pattern.sub(lambda m: f" {m[1] or ''} ", text)


def text_form(text: str) -> str:
    r"""Return a form in which two spellings of the same text are equal: no spaces, no `\text`.

    Example: `1, 2,\ldots ,n` and `1,2,\ldots,n` both become `1,2,\ldots,n`.
    """
    text = untext(text).replace("\\{", "⦃").replace("\\}", "⦄")
    # Braces around one character and spaces have no meaning, except between digits.
    text = re.sub(r"\{\s*([^{}\\\s])\s*\}", r"\1", text)
    text = re.sub(r"\\(times|cdot)(?![A-Za-z])", "*", text)
    text = re.sub(r"(?<=[\d.])\s+(?=[\d.])", "⎵", text)
    return re.sub(r"\s+", "", text).rstrip(".")


def shortened(words: str) -> str:
    """Return a statement without articles, plurals and the like; "n odd" is "odd n"."""
    for ending in NOTATION["endings"]:
        words = words.removesuffix(f" {ending}")
    singular = [w[:-1] if len(w) > 3 and re.search("[^s]s$", w) else w for w in words.split()]
    kept = sorted((w for w in singular if w not in _FILLERS), key=lambda w: len(w) == 1)
    return " ".join(kept) or words
