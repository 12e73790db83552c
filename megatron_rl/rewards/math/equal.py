"""Equality of expressions, decided by their values at several points.

Rational parts are computed as fractions, so rational functions are compared exactly at rational
points. Everything else is compared at 40, 160 and 600 digits relative to its largest intermediate
sum. Points where a side has no real value are skipped; if all are, complex values are compared.
"""

from fractions import Fraction

import mpmath
from mpmath import mp

from megatron_rl.rewards.math.evaluate import Context, Number, Undefined, evaluate, to_mp
from megatron_rl.rewards.math.node import Node, OverLimit

DIGITS = (40, 160, 600)
# Positive, negative and integer points: sqrt(x^2) is x only at the first, (-1)^n real at the last.
_POINTS = (
    (Fraction(7, 3), Fraction(13, 5), Fraction(19, 7), Fraction(29, 11), Fraction(37, 13)),
    (Fraction(3, 11), Fraction(5, 17), Fraction(9, 23), Fraction(2, 13), Fraction(4, 19)),
    (Fraction(-11, 4), Fraction(-17, 6), Fraction(-5, 7), Fraction(-23, 9), Fraction(-31, 10)),
    (Fraction(9, 2), Fraction(-7, 5), Fraction(16, 9), Fraction(-3, 8), Fraction(21, 4)),
    *(tuple(map(Fraction, p)) for p in ((3, 5, 4, 7, 2), (6, 2, 9, 4, 5), (11, 8, 3, 10, 6))),
)
ENOUGH_POINTS = 3


def same_value(a: Node, b: Node) -> bool:
    """Return True if two expressions are equal where both have a value; `Undefined` if nowhere."""
    symbols = sorted(a.symbols | b.symbols)
    if _agree_in(a, b, symbols, log_base=None):
        return True
    # A logarithm without a base may be natural or decimal.
    has_log = a.calls("log") or b.calls("log")
    return has_log and _agree_in(a, b, symbols, log_base=Fraction(10))


def proportional(a: Node, b: Node, *, positive: bool) -> bool:
    """Return True if `a` is a constant multiple of `b`, so that `a = 0` and `b = 0` are equivalent.

    For inequalities the constant must be `positive`.
    """
    symbols = sorted(a.symbols | b.symbols)
    first: tuple[Number, Number] | None = None
    compared = 0
    for context in _contexts(symbols):
        with mp.workdps(DIGITS[1]):
            if (pair := _values(a, b, context, real=True)) is None:
                continue
            x, y = pair
            if _close(x, Fraction(0), context.scale) != _close(y, Fraction(0), context.scale):
                return False
            if _close(x, Fraction(0), context.scale):
                continue
            if positive and (to_mp(x) > 0) != (to_mp(y) > 0):
                return False
            if first is None:
                first = pair
            elif not _close(_times(x, first[1]), _times(y, first[0]), context.scale):
                return False
            compared += 1
    return compared >= (ENOUGH_POINTS if symbols else 1)


def _times(x: Number, y: Number) -> Number:
    return x * y if isinstance(x, Fraction) and isinstance(y, Fraction) else to_mp(x) * to_mp(y)


def _close(x: Number, y: Number, scale: mpmath.mpf) -> bool:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    x, y = to_mp(x), to_mp(y)
    size = max(abs(x), abs(y), scale)
    return bool(abs(x - y) <= size * mpmath.mpf(10) ** (12 - mp.dps))


def _contexts(symbols: list[str], log_base: Fraction | None = None) -> list[Context]:
    """Return the points at which to compare."""
    if len(symbols) > 12:
        raise OverLimit(f"{len(symbols)} variables: over the limit of 12")
    points = _POINTS if symbols else _POINTS[:1]
    values = ({s: p[i % 5] + i // 5 for i, s in enumerate(symbols)} for p in points)
    return [Context(v, log_base) for v in values]


def _values(a: Node, b: Node, context: Context, *, real: bool) -> tuple[Number, Number] | None:
    """Return both values at a point; None if one is undefined (or not real)."""
    context.scale = mpmath.mpf(0)
    try:
        pair = evaluate(a, context), evaluate(b, context)
    except (Undefined, ZeroDivisionError, OverflowError):
        return None
    if real and any(_is_complex(x, context.scale) for x in pair):
        return None
    if any(not isinstance(x, Fraction) and not mpmath.isfinite(x) for x in pair):
        return None
    return pair


def _is_complex(x: Number, scale: mpmath.mpf) -> bool:
    noise = mpmath.mpf(10) ** (12 - mp.dps)
    return isinstance(x, mpmath.mpc) and abs(x.imag) > max(abs(x), scale) * noise


def _agree_in(a: Node, b: Node, symbols: list[str], log_base: Fraction | None) -> bool:
    for real in (True, False):
        compared = 0
        for context in _contexts(symbols, log_base):
            agreed = _agree_at(a, b, context, real=real)
            if agreed is False:
                return False
            compared += agreed is True
        if compared >= (ENOUGH_POINTS if symbols else 1):
            return True
    raise Undefined("the expressions have no values to compare")


def _agree_at(a: Node, b: Node, context: Context, *, real: bool) -> bool | None:
    """Return True if the values at a point are equal; None if one is undefined."""
    for digits in DIGITS:
        with mp.workdps(digits):
            if (pair := _values(a, b, context, real=real)) is None:
                return None
            if not _close(*pair, context.scale):
                return False
            if all(isinstance(x, Fraction) for x in pair):
                return True
    return True
