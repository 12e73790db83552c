r"""Units, percent and money around an answer: `5\text{ cm}`, `\$18.90`, `50\%`, `90^\circ`."""

import re
from fractions import Fraction
from typing import Self

import msgspec

MAX_CHARACTERS = 400
"""Longer texts have no unit."""

_UNITS = """
length: 0.001 mm,millimeter,millimeters,millimetre,millimetres
length: 0.01 cm,centimeter,centimeters,centimetre,centimetres; 1 m,meter,meters,metre,metres
length: 1000 km,kilometer,kilometers,kilometre,kilometres; 0.0254 in,inch,inches
length: 0.3048 ft,foot,feet; 0.9144 yd,yard,yards; 1609.344 mi,mile,miles
mass: 0.001 mg,milligram,milligrams; 1 g,gram,grams; 1000 kg,kilogram,kilograms
mass: 453.59237 lb,lbs,pound,pounds; 28.349523125 oz,ounce,ounces
time: 1 s,sec,secs,second,seconds; 60 min,mins,minute,minutes; 3600 h,hr,hrs,hour,hours
time: 86400 day,days; 604800 week,weeks
year: 1 yr,yrs,year,years
month: 1 month,months
volume: 0.001 ml,mL,milliliter,milliliters,millilitre,millilitres
volume: 1 l,L,liter,liters,litre,litres
money: 0.01 cent,cents; 1 dollar,dollars,usd,USD
euro: 1 euro,euros
speed: 1 mph,miles per hour,mi/h,miles/hour,mi/hr,miles/hr
speed km/h: 1 km/h,km/hr,kph,kilometers per hour,kmh,kilometers/hour
speed m/s: 1 m/s,meters per second,meters/second
angle: 1 degree,degrees,deg
radian: 1 radian,radians,rad
percent: 1 percent,per cent,percentage,pct,%
units: 1 unit,units
"""
"""Lines of a kind: size in its base unit and names, of one unit after the other."""
_NAMES = {
    name: (kind, Fraction(size))
    for kind, units in (line.split(": ") for line in _UNITS.strip().splitlines())
    for size, names in (unit.split(" ", 1) for unit in units.split("; "))
    for name in names.split(",")
}

_WORDS = re.compile(
    r"^(?P<value>.*?[\d)}\]!A-Za-z])\s*(?P<unit>"
    r"(?:(?:square|sq\.?|cubic|cu\.?)\s+)?"
    r"[A-Za-z][A-Za-z./]{0,24}\.?(?:\s+per\s+[a-z]+|\s+(?:squared|cubed))?"
    r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?)$"
)
_TEXT_UNIT = re.compile(
    r"^(?P<value>.*?)\s*\\(?:text|textrm|textbf|textit|textnormal|mathrm|mbox|hbox|rm|operatorname)\s*"
    r"\{\s*(?P<unit>[^{}]*?)\s*\}\s*(?P<power>\^\s*\{?\s*[23]\s*\}?)?$"
)
_PERCENT = re.compile(r"^(?P<value>.+?)\s*(?:\\%|%)$")
_DEGREES = re.compile(r"^(?P<value>.+?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:[CF])?$")
_MONEY = re.compile(r"^(?P<sign>[-+]?)\s*(?:\\\$|\$|€|£|¥)\s*(?P<value>.+)$")
_NOT_UNITS = {"or", "and", "mod", "if", "for", "where", "when", "with", "to", "than", "over"}


class Unit(msgspec.Struct, frozen=True):
    """A unit. Example: `square centimeters` is `Unit("length^2", Fraction(1, 10000))`."""

    kind: str
    """Kind of the table; `noun` for any other counted thing."""
    size: Fraction = Fraction(1)

    def agrees(self, other: Self) -> bool:
        """Return True if values in these two units can be equal."""
        loose = ("noun", "units")
        return self.kind == other.kind or self.kind in loose or other.kind in loose


def split_unit(text: str, *, letters: bool = True) -> tuple[str, Unit] | None:
    """Split a text into value and unit; None if it does not end in a unit.

    A single letter in plain text (`5 m`) is a variable unless `letters` may be units.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    if (match := _MONEY.match(text)) is not None:
        return match["sign"] + match["value"], Unit("money")
    if (match := _PERCENT.match(text)) is not None:
        return match["value"], Unit("percent")
    if (match := _DEGREES.match(text)) is not None:
        return match["value"], Unit("angle")
    if (match := _TEXT_UNIT.match(text)) is not None:
        return _named(match["value"], match["unit"], match["power"] or "", nouns=True)
    if (match := _WORDS.match(text)) is not None:
        words = match["unit"]
        if len(words.rstrip(".")) == 1 and not letters:
            return None
        counted = re.fullmatch(r"[-\d.,/]+", match["value"]) is not None and len(words) > 2
        return _named(match["value"], words, "", nouns=counted)
    return None


def _named(value: str, words: str, power: str, *, nouns: bool) -> tuple[str, Unit] | None:
    value = value.strip()
    if not value or not re.search(r"[\d\\A-Za-z)]$|\}$|!$", value):
        return None
    match = re.fullmatch(
        r"(?P<before>square|sq\.?|cubic|cu\.?)?\s*(?P<name>.*?)\.?\s*(?P<after>squared|cubed)?"
        r"\s*(?P<caret>\^\s*\{?\s*[23]\s*\}?)?",
        words.strip(),
    )
    if match is None:
        return None
    exponent = 1
    for part in (match["before"], match["after"], match["caret"], power):
        if part:
            exponent = 2 if re.search(r"sq|2", part) else 3
    name = match["name"].strip()
    known = _NAMES.get(name) or _NAMES.get(name.lower())
    if known is not None:
        kind, size = known
        suffix = f"^{exponent}" if exponent > 1 else ""
        return value, Unit("units" if kind == "units" else kind + suffix, size**exponent)
    is_name = re.fullmatch(r"[A-Za-z .'-]+", name) and not set(name.lower().split()) & _NOT_UNITS
    return (value, Unit("noun")) if nouns and is_name and re.search(r"\d", value) else None
