r"""Units, percent and money around an answer: `5\text{ cm}`, `\$18.90`, `50\%`, `90^\circ`."""

import re
from fractions import Fraction
from typing import Self

import msgspec

from megatron_rl.rewards.math.normalize import NOTATION

MAX_CHARACTERS = 400  # longer texts have no unit

_WORDS = re.compile(
    r"^(?P<value>.*?[\d)}\]!A-Za-z])(?P<space>\s*)(?P<unit>"
    r"(?:(?:square|sq\.?|cubic|cu\.?)\s+)?"
    r"[A-Za-z\u4e00-\u9fff][A-Za-z\u4e00-\u9fff./]{0,24}\.?(?:\s+per\s+[a-z]+|\s+(?:squared|cubed))?"
    r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?)$"
)
_TEXT_UNIT = re.compile(
    r"^(?P<value>.*?)\s*\\(?:text|textrm|textbf|textit|textnormal|mathrm|mbox|hbox|rm|operatorname)\s*"
    r"\{\s*\(?(?P<unit>[^{}()]*?)\)?\s*\}\s*(?P<power>\^\s*\{?\s*[23]\s*\}?)?$"
)
_PERCENT = re.compile(r"^(?P<value>.+?)\s*(?:\\%|%)$")
_DEGREES = re.compile(r"^(?P<value>.+?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:[CF])?$")
_MONEY = re.compile(r"^(?P<sign>[-+]?)\s*(?P<unit>\\\$|\$|€|£|¥)\s*(?P<value>.+)$")
_CURRENCIES = {"€": "euro", "£": "pound sterling", "¥": "yen"}
_PARTS = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\\text\s*\{\s*)?([a-zA-Z]+)\.?\s*\}?,?\s*(?:and\s+)?")
_OPERATIONS = frozenset(NOTATION["operations"].split()) | NOTATION["powers"].keys()
_LOOSE = ("units", "length", "length^2", "length^3")


class Unit(msgspec.Struct, frozen=True):
    """A unit. Example: `square centimeters` is `Unit("length^2", Fraction(1, 10000))`."""

    kind: str  # kind of the table, with its power; any other counted thing is its own kind
    size: Fraction = Fraction(1)
    letter: bool = False  # True for a single letter in plain text, which may be a variable

    def agrees(self, other: Self) -> bool:
        """Return True if values in these two units can be equal."""
        kinds = {self.kind, other.kind}
        return len(kinds) == 1 or ("units" in kinds and kinds <= set(_LOOSE))


def _table() -> dict[str, tuple[str, Fraction]]:
    names = {}
    for line in NOTATION["metric"]:
        kind, size, short, *rest = line.split()
        for prefix, (word, power) in {"": ("", 0), **NOTATION["prefixes"]}.items():
            scaled = kind, Fraction(size) * Fraction(10) ** power
            names[prefix + short] = scaled
            for name in rest:
                names |= dict.fromkeys((word + name, word + name + "s"), scaled)
            if len(rest) and len(rest[0]) == 1:  # L and l
                names[prefix + rest[0]] = scaled
    for kind, units in NOTATION["units"].items():
        for unit in units.split("; "):
            size, *rest = unit.split()
            for name in rest:
                names |= dict.fromkeys((name, f"{name}s"), (kind, Fraction(size)))
    return names


_NAMES = _table()


def split_unit(text: str, *, letters: bool = True) -> tuple[str, Unit] | None:
    """Split a text into value and unit; None if it does not end in a unit.

    A single letter in plain text (`5 m`) is a variable unless `letters` may be units.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    if (match := _MONEY.match(text)) is not None:
        return match["sign"] + match["value"], Unit(_CURRENCIES.get(match["unit"], "money"))
    if (match := _PERCENT.match(text)) is not None:
        return match["value"], Unit("percent")
    if (match := _DEGREES.match(text)) is not None:
        return match["value"], Unit("angle")
    if (mixed := _mixed(text)) is not None:
        return mixed
    if (match := _TEXT_UNIT.match(text)) is not None:
        unit = _unit(match["unit"] + (match["power"] or ""), noun=2)
    elif (match := _WORDS.match(text)) is not None:
        counted = re.fullmatch(r"[-\d.,/]+", match["value"]) is not None and match["space"]
        noun = 1 if not match["unit"].isascii() else 4 if counted else 0
        unit = _unit(match["unit"], noun=noun)
        if unit is not None and len(match["unit"].rstrip(".")) == 1:
            if not letters:
                return None
            unit = msgspec.structs.replace(unit, letter=match["unit"].isascii())
    if match is None or unit is None:
        return None
    value = match["value"].strip()
    return (value, unit) if re.search(r"[\d\\A-Za-z)]$|\}$|!$", value) else None


def _mixed(text: str) -> tuple[str, Unit] | None:
    r"""Return the sum of several units of a kind: `2\text{ h }30\text{ min}`."""
    text = re.sub(r"^\\text\s*\{([^{}]*)\}$", r"\1", text)
    parts = _PARTS.findall(text)
    if len(parts) < 2 or _PARTS.sub("", text).strip():
        return None
    units = [u for _, name in parts if (u := _unit(name, noun=0)) is not None]
    if len(units) != len(parts) or len({u.kind for u in units}) > 1:
        return None
    sizes = (Fraction(value) * u.size for (value, _), u in zip(parts, units, strict=True))
    total = sum(sizes, Fraction(0)) / units[-1].size
    return f"\\frac{{{total.numerator}}}{{{total.denominator}}}", units[-1]


def _unit(words: str, *, noun: int) -> Unit | None:
    """Read a unit; any other word of at least `noun` letters is a counted thing, 0 for none."""
    words = " ".join(words.strip().split())
    over = re.split(r"\s*/\s*|\s+per\s+|\s+an?\s+(?=hour|minute|second)", words, maxsplit=1)
    if len(over) == 2 and words not in _NAMES:
        above, below = (_unit(w, noun=0) for w in over)
        if above is not None and below is not None:
            return Unit(f"{above.kind}/{below.kind}", above.size / below.size)
    match = re.fullmatch(
        r"(?P<before>square|sq\.?|cubic|cu\.?|平方|立方)?\s*(?P<name>.*?)\.?\s*(?P<after>squared|cubed)?"
        r"\s*(?P<caret>\^?\s*\{?\s*[23²³]\s*\}?)?",
        words,
    )
    if match is None:
        return None
    *_, power = ["", *filter(None, match.group("before", "after", "caret"))]
    exponent = 1 if not power else 2 if re.search(r"sq|[2²平]", power) else 3
    name = match["name"].strip()
    known = _NAMES.get(name) or _NAMES.get(name.lower())
    if known is not None:
        kind, size = known
        suffix = f"^{exponent}" if exponent > 1 and kind != "units" else ""
        return Unit(kind + suffix, size**exponent)
    words_ = name.casefold().split()
    if not noun or len(name) < noun or exponent > 1 or not re.fullmatch(r"[^\W\d_][\w .'-]*", name):
        return None
    if any(w.rstrip("s") in _OPERATIONS or w in _OPERATIONS for w in words_):
        return None
    return Unit(words_[-1].rstrip("s"))
