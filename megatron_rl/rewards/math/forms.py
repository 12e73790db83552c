"""Forms of answers: an expression, a tuple, a set, an interval, an equation, words ..."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice, product

import msgspec

from megatron_rl.rewards.math.expression import read_expression
from megatron_rl.rewards.math.node import (
    MAX_CHARACTERS,
    Node,
    OverLimit,
    Unreadable,
    over_length,
    with_sign,
)
from megatron_rl.rewards.math.normalize import NOTATION, shortened, text_form, untext

MAX_ITEMS = 200


class Expression(msgspec.Struct, frozen=True):
    r"""A formula without a relation. Example: `2\pi`."""

    node: Node


class Collection(msgspec.Struct, frozen=True):
    r"""Several values. Example: `(1, 2)` has the brackets `(` and `)`, a bare list has none.

    `{` is a set; `(` and `[` with two members may be an interval, depending on the other side.
    Values of which each may be the answer (`1/2` or `50\%`) have the brackets `""` and `or`.
    """

    opening: str
    closing: str
    items: tuple[Form, ...]


class Union(msgspec.Struct, frozen=True):
    """Intervals and sets joined by a union sign."""

    items: tuple[Form, ...]


class Relation(msgspec.Struct, frozen=True):
    r"""A chain of comparisons. Example: `1 < x \le 2` has the operators `<` and `le`."""

    parts: tuple[Form, ...]
    operators: tuple[str, ...]
    texts: tuple[str, ...]  # text form of each part


class Words(msgspec.Struct, frozen=True):
    """Text that is only compared as text: `no solution`, a series with dots, a congruence."""

    text: str


class NamedSet(msgspec.Struct, frozen=True):
    """`R`, `Z`, `Q`, `N`, `C` or `empty`."""

    name: str


class Matrix(msgspec.Struct, frozen=True):
    """Rows of a matrix, or a column vector."""

    rows: tuple[tuple[Form, ...], ...]


class Based(msgspec.Struct, frozen=True):
    """A number in a base. Example: `1011_2` has the value 11."""

    digits: str
    value: int


Form = Expression | Collection | Union | Relation | Words | NamedSet | Matrix | Based

_STATEMENT = re.compile(
    r"\\(?:ldots|vdots|ddots|forall|exists|equiv|pmod|mod|mapsto|to|rightarrow|Rightarrow"
    r"|implies|iff|Leftrightarrow|perp|parallel|cong|sim|subset|subseteq|nmid)(?![A-Za-z])"
    r"|\\begin\{(?:cases|aligned|array|align)"
)
# The arrow under a limit does not make a statement.
_UNDER_LIMIT = re.compile(r"\\lim\s*_\s*\{(?:[^{}]|\{[^{}]*\})*\}")
_MATRIX = re.compile(r"^\\begin\{([pbvBV]?matrix)\}(.*)\\end\{\1\}$", re.DOTALL)
_RELATION = re.compile(r"\\(le|ge|ne|in|approx)(?![A-Za-z])|([=<>])")
_COMMAND = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING = {"(": ")", "[": "]", "\\{": "\\}", "\\langle": "\\rangle", "{": "}"}
_CLOSING = {*_OPENING.values(), "}", "\\rfloor", "\\rceil"}
_OPEN = {*_OPENING, "{", "\\lfloor", "\\lceil"}
_THOUSANDS = re.compile(r"^-?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
_BASED = re.compile(r"^([0-9A-F]+)\s*_\s*\{?\s*(\d{1,2})\s*\}?$")
_NAMED = re.compile(r"^\\mathbb\s*\{?\s*([RZQNC])\s*\}?$")
_ALL_TEXT = re.compile(r"^\\(?:text\w*|mathrm|mbox|hbox|operatorname\*?)\s*\{([^{}]*)\}$")
_PLAIN_WORDS = re.compile(r"^[A-Za-z\u4e00-\u9fff][A-Za-z\u4e00-\u9fff' .-]*$")
_SHORT_WORDS = NOTATION["short"].split()
_SYNONYMS = {shortened(name): group[0] for group in NOTATION["synonyms"] for name in group}
_SETS = {name: letter for letter, names in NOTATION["sets"].items() for name in names}
_WORD_RUN = re.compile(
    r"(?<![A-Za-z\\_{])(?:[A-Za-z]{4,}|(?:and|or|not|is|of|if|to|the|it|are|for|but)(?![A-Za-z]))"
)
_QUANTITY = re.compile(r"\\(?:sum|prod|int|lim)(?![A-Za-z])|[PEN]\s*\(")
_COMMA = re.compile("[,;]")
_CUP = re.compile(r"\\cup(?![A-Za-z])")
_JOIN = re.compile(r"\s(?:and|or)\s|\\vee(?![A-Za-z])|\\wedge(?![A-Za-z])")


def read_form(text: str) -> Form:
    """Parse a normalized text, or raise `Unreadable` or `OverLimit`."""
    if len(text) > MAX_CHARACTERS and not text.lstrip("-").isdigit():
        raise over_length(text)
    text = text.strip().rstrip(".").strip()
    if all_text := _ALL_TEXT.match(text):
        text = all_text[1].strip()
    if matrix := _MATRIX.match(text):
        return _matrix(matrix[2])
    if _STATEMENT.search(_UNDER_LIMIT.sub("", text)):
        return Words(text_form(text))
    marked, plain = all_text is not None or "\\text" in text, untext(text).strip()
    if (words := _statement(plain, marked=marked)) is not None:
        return words
    # Other words are names, or make a formula unreadable; they are no products of letters.
    text = plain if all_text else untext(text, words=False).strip()
    if not text:
        raise Unreadable("the text is empty")
    if _THOUSANDS.match(text):
        return Expression(read_expression(text.replace(",", "")))
    for separator in (_COMMA, _JOIN):
        if matches := _outside(separator, text):
            closing = "or" if all(m[0].strip() == "or" for m in matches) else ""
            return Collection("", closing, _items(_split(text, matches)))
    if (relation := _relation(text)) is not None:
        return relation
    if matches := _outside(_CUP, text):
        return Union(_items(_split(text, matches)))
    if len(matches := _outside(":", text)) > 1:
        return _ratio(_items(_split(text, matches)))
    if (bracketed := _bracketed(text)) is not None:
        return bracketed
    if (based := _BASED.match(text)) is not None and 2 <= int(based[2]) <= 36:
        with suppress(ValueError):  # A_2 is a variable
            return Based(based[1], int(based[1], int(based[2])))
    if (named := _NAMED.match(text)) is not None:
        return NamedSet(named[1])
    if text in ("\\emptyset", "\\{ \\}", "\\{\\}"):
        return NamedSet("empty")
    if run := _WORD_RUN.search(text):
        raise Unreadable(f"words inside a formula: {run[0]!r}")
    node = read_expression(text)
    if node.has("pm", "mp"):
        upper, lower = (Expression(with_sign(node, upper)) for upper in (True, False))
        return Collection("", "", (upper, lower))
    return Expression(node)


def _statement(text: str, *, marked: bool) -> Form | None:
    """Return the meaning of words; None for anything else, such as a product `xy`."""
    if match := re.match(r"(?i)(yes|no),\s*[a-z' ]+\.?$", text):
        text = match[1]
    lengths = [len(word) for word in re.split(r"[ .'-]+", text) if word not in ("and", "or")]
    longest = max(lengths, default=0)
    is_text = longest > (1 if marked else 3) or text.lower() in _SHORT_WORDS
    # XY is a name and not YX; xy is a product of variables.
    if not re.fullmatch(r"[A-Z]{2,}", text) and not (is_text and _PLAIN_WORDS.match(text)):
        return None
    words = " ".join(text.casefold().replace(".", " ").split())
    names = re.split(r"\s+and\s+", words)
    if len(names) > 1:
        return Collection("", "", tuple(Words(_canonical(name)) for name in names))
    words = _canonical(words)
    if words == "infinite":
        return Expression(Node("infinity"))
    return NamedSet(_SETS[words]) if words in _SETS else Words(words)


def _canonical(words: str) -> str:
    """Return the shortest words that mean the same."""
    return _SYNONYMS.get(short := shortened(words), short)


def _ratio(terms: tuple[Form, ...]) -> Collection:
    """Return a ratio of three or more as quotients by its first term: 2:4:6 is 1:2:3."""
    nodes = [t.node for t in terms if isinstance(t, Expression)]
    if len(nodes) != len(terms):
        raise Unreadable("a ratio of terms that are not expressions")
    return Collection(":", ":", tuple(Expression(Node("div", (n, nodes[0]))) for n in nodes))


def _items(texts: list[str]) -> tuple[Form, ...]:
    if len(texts) > MAX_ITEMS:
        raise OverLimit(f"{len(texts)} items: over the limit of {MAX_ITEMS}")
    out: list[Form] = []
    for text in texts:
        # "1, 2, and 3" leaves an item that starts with the word.
        if not (text := re.sub(r"^(?:and|or)\s", "", text.strip()).strip()):
            raise Unreadable("an empty item in a list")
        form = read_form(text)
        # 1, \pm 2 has three members.
        if isinstance(form, Collection) and not form.opening:
            out.extend(form.items)
        else:
            out.append(form)
    return tuple(out)


def _tokens(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield (token, position, depth of brackets around it); closing brackets count as inside."""
    depth = 0
    for match in _COMMAND.finditer(text):
        token = match[0]
        if token in _OPEN:
            depth += 1
        yield token, match.start(), depth
        if token in _CLOSING:
            depth -= 1


def _outside(pattern: str | re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Return the matches of a pattern outside all brackets."""
    matches = list(re.finditer(pattern, text))
    depths = {position: depth for _, position, depth in _tokens(text)} if matches else {}
    return [m for m in matches if depths.get(m.start(), 1) == 0]


def _split(text: str, separators: list[re.Match[str]]) -> list[str]:
    edges = [0, *(edge for match in separators for edge in match.span()), len(text)]
    return [text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _relation(text: str) -> Relation | None:
    if not (matches := _outside(_RELATION, text)):
        return None
    if len(matches) > MAX_ITEMS:
        raise OverLimit(f"a chain of {len(matches)} relations: over the limit of {MAX_ITEMS}")
    texts = [side.strip() for side in _split(text, matches)]
    if not all(texts):
        if len(texts) != 2 or not texts[1] or matches[0][0] not in ("=", "\\approx"):
            raise Unreadable("a relation with an empty side")
        right = texts[1]  # "= 5" is "answer = 5"
        return Relation((Words("answer"), read_form(right)), ("=",), ("answer", text_form(right)))
    operators = tuple((m[1] or m[2]).replace("approx", "=") for m in matches)
    *heads, end = texts
    sides = (*map(_side, heads), read_form(end) if "\\sum" in end else _side(end))
    return Relation(sides, operators, tuple(text_form(t) for t in texts))


def _side(text: str) -> Form:
    r"""Parse a side of a relation; a name that is not a formula (`\angle ABC`) is words."""
    try:
        return read_form(text)
    except Unreadable:
        if re.search(r"\d", text) and not _QUANTITY.match(text):
            raise
        return Words(text_form(text))


def _bracketed(text: str) -> Form | None:
    for opening, closing in _OPENING.items():
        if not text.startswith(opening):
            continue
        end = next((p for t, p, d in _tokens(text) if t in _CLOSING and d == 1), None)
        last = next((c for c in _OPENING.values() if text.endswith(c)), None)
        if end is None or last is None or end != len(text) - len(last):
            return None
        inside = text[len(opening) : end].strip()
        if opening == "\\{":
            return _set(inside)
        if opening == "{":
            return _set(inside) if _outside(_COMMA, inside) else None
        if not (commas := _outside(_COMMA, inside)):
            return None if last == closing and "\\cup" not in inside else read_form(inside)
        if opening == "\\langle" or last == "\\rangle":
            opening, last = "(", ")"
        return _tuple(opening, last, _split(inside, commas))
    return None


def _tuple(opening: str, closing: str, texts: list[str]) -> Collection:
    r"""Return a tuple; `(\pm 1, \pm 2)` is a list of four."""
    members = [_items([text]) for text in texts]
    if "\\pm" not in "".join(texts):
        return Collection(opening, closing, tuple(chain(*members)))
    if len(tuples := list(islice(product(*members), MAX_ITEMS + 1))) > MAX_ITEMS:
        raise OverLimit(f"over {MAX_ITEMS} tuples")
    return Collection("", "", tuple(Collection(opening, closing, t) for t in tuples))


def _set(inside: str) -> Form:
    if not inside:
        return NamedSet("empty")
    for bar in (r"\\vert(?![A-Za-z])", r"\|", ":"):
        parts = _split(inside, _outside(bar, inside))
        if len(parts) == 2 and re.match(r"^[a-zA-Z]\s*(?:\\in|$)", parts[0].strip()):
            # {x | x > 1} has the form of its condition.
            return read_form(parts[1])
    return Collection("{", "}", _items(_split(inside, _outside(_COMMA, inside))))


def _matrix(body: str) -> Matrix:
    rows = [row for row in re.split(r"\\\\|\\cr(?![A-Za-z])", body) if row.strip()]
    if sum(row.count("&") + 1 for row in rows) > MAX_ITEMS:
        raise OverLimit(f"a matrix of over {MAX_ITEMS} entries")
    return Matrix(tuple(tuple(read_form(cell) for cell in row.split("&")) for row in rows))
