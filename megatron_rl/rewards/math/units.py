r"""Units, percent and money around an answer: `5\text{ cm}`, `\$18.90`, `50\%`, `90^\circ`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

F = Fraction
MAX_CHARACTERS = 400
"""Longer texts have no unit."""

_NAMES: dict[str, tuple[str, Fraction]] = {}
"""Name -> (kind, size in the kind's base unit)."""


def _define(kind: str, size: Fraction | int, names: str) -> None:
    for name in names.split(","):
        _NAMES[name] = (kind, Fraction(size))


_define("length", F(1, 1000), "mm,millimeter,millimeters,millimetre,millimetres")
_define("length", F(1, 100), "cm,centimeter,centimeters,centimetre,centimetres")
_define("length", 1, "m,meter,meters,metre,metres")
_define("length", 1000, "km,kilometer,kilometers,kilometre,kilometres")
_define("length", F(254, 10000), "in,inch,inches")
_define("length", F(3048, 10000), "ft,foot,feet")
_define("length", F(9144, 10000), "yd,yard,yards")
_define("length", F(1609344, 1000), "mi,mile,miles")
_define("mass", F(1, 1000), "mg,milligram,milligrams")
_define("mass", 1, "g,gram,grams")
_define("mass", 1000, "kg,kilogram,kilograms")
_define("mass", F(45359237, 100000), "lb,lbs,pound,pounds")
_define("mass", F(45359237, 1600000), "oz,ounce,ounces")
_define("time", 1, "s,sec,secs,second,seconds")
_define("time", 60, "min,mins,minute,minutes")
_define("time", 3600, "h,hr,hrs,hour,hours")
_define("time", 86400, "day,days")
_define("time", 604800, "week,weeks")
_define("year", 1, "yr,yrs,year,years")
_define("month", 1, "month,months")
_define("volume", F(1, 1000), "ml,mL,milliliter,milliliters,millilitre,millilitres")
_define("volume", 1, "l,L,liter,liters,litre,litres")
_define("money", F(1, 100), "cent,cents")
_define("money", 1, "dollar,dollars,usd,USD")
_define("euro", 1, "euro,euros")
_define("speed", 1, "mph,miles per hour,mi/h,miles/hour,mi/hr,miles/hr")
_define("speed km/h", 1, "km/h,km/hr,kph,kilometers per hour,kmh,kilometers/hour")
_define("speed m/s", 1, "m/s,meters per second,meters/second")
_define("angle", 1, "degree,degrees,deg")
_define("radian", 1, "radian,radians,rad")
_define("percent", 1, "percent,per cent,percentage,pct,%")
_define("units", 1, "unit,units")

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


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit. Example: `square centimeters` is `Unit("length^2", Fraction(1, 10000))`."""

    kind: str
    """Kind of the table; `noun` for any other counted thing."""
    size: Fraction = Fraction(1)

    def agrees(self, other: Unit) -> bool:
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
