"""Equality of expressions, decided by their values at many points.

Rational parts are computed as fractions, so rational functions are compared exactly at rational
points. Everything else is compared with a precision that grows until `SURE` digits remain after
cancellation: two values are equal only if that many digits agree, and over the limit if they cannot
be had. Variables of integer functions take integers of many residues.
"""

from collections.abc import Iterator
from fractions import Fraction
from itertools import cycle

import mpmath
from mpmath import mp

from megatron_rl.rewards.math.evaluate import (
    GUARD_BITS,
    Context,
    Number,
    Undefined,
    evaluate,
    to_mp,
)
from megatron_rl.rewards.math.node import Node, OverLimit

FIRST, MOST = 40, 4000
"""Digits of the first evaluation, which shows most differences, and of the last one."""
DIFFERENT, SURE = 10, 60
"""Digits of both values that must be sure to call them different, and equal."""
# Small, large, negative points: sqrt(x^2) is x only where x is positive.
_REAL = tuple(
    tuple(map(Fraction, point.split()))
    for point in (
        "7/3 13/5 19/7 29/11 37/13",
        "3/11 5/17 9/23 2/13 4/19",
        "-11/4 -17/6 -5/7 -23/9 -31/10",
        "9/2 -7/5 16/9 -3/8 21/4",
        "-2/7 8/3 -11/5 31/6 -9/4",
        "1009/10 57/8 641/9 83/7 211/6",
        "3 5 4 7 2",
        "6 2 9 4 5",
        "11 8 3 10 6",
    )
)
_SMALL = "1 2 3 4 5 6 7 8 9 10 11 12 13 16 24 0 -1 -2 -3 -8"
_INTEGERS = tuple(map(int, f"{_SMALL} 30 49 64 97 120 1234 5039 99991 6".split()))
"""A prime number of integers of many residues, so that variables meet in many orders."""
_INTEGER_NAMES = frozenset("nmkjlNMKL")
ENOUGH_POINTS = 3
ROUNDED_DECIMALS = 4
ROUNDED_DIGITS = 6
"""A decimal with at least this many decimals and digits equals any value that rounds to it."""
MAX_POWER = 300  # largest power of ten that moves a point


def same_value(a: Node, b: Node) -> bool:
    """Return True if two expressions are equal where both have a value; `Undefined` if nowhere."""
    if _agree_in(a, b, log_base=None):
        return True
    # A logarithm without a base may be natural or decimal.
    has_log = any(n.op == "call" and n.name == "log" for n in (*a.walk(), *b.walk()))
    return has_log and _agree_in(a, b, log_base=Fraction(10))


def same_expression(gold: Node, answer: Node) -> bool:
    """Compare values; a long decimal also equals a value that rounds to it."""
    if gold.has("infinity") or answer.has("infinity"):
        return _infinite(gold) == _infinite(answer) != 0
    if same_value(gold, answer):
        return True
    short, long = gold, answer
    if decimals(short) < 0 or 0 <= decimals(long) < decimals(short):
        short, long = long, short
    return _is_rounding(short, long)


def _infinite(node: Node) -> int:
    """Return +1 for infinity, -1 for minus infinity, 0 for anything else."""
    return -_infinite(node.args[0]) if node.op == "neg" else int(node.op == "infinity")


def decimals(node: Node) -> int:
    """Return the digits after the point of a decimal literal, -1 for anything else.

    A power of ten moves the point: 2.5e-3 has 4.
    """
    if node.op == "mul" and len(node.args) == 2 and node.args[1].op == "pow":
        (ten, power), digits = node.args[1].args, decimals(node.args[0])
        size = power.args[0] if power.op == "neg" else power
        if digits >= 0 and ten.value == 10 and size.is_integer and size.value <= MAX_POWER:
            return max(digits + int(size.value) * (1 if power.op == "neg" else -1), 0)
    return decimals(node.args[0]) if node.op == "neg" else node.decimals


def _is_rounding(literal: Node, exact: Node) -> bool:
    places = decimals(literal)
    if places < ROUNDED_DECIMALS or exact.symbols or 0 <= decimals(exact) == places:
        return False
    value = evaluate(literal, Context())
    assert isinstance(value, Fraction)
    if len(str(abs(value.numerator * 10**places // value.denominator))) < ROUNDED_DIGITS:
        return False
    error = Fraction(1, 2 * 10**places)
    if is_near(literal, exact, error):
        return True
    if exact.has("pi", "e", "root", "pow", "call"):
        return False  # as good as never halfway
    half = evaluate(exact, Context())
    # A half is rounded up.
    return isinstance(half, Fraction) and abs(value) - abs(half) == error


def proportional(a: Node, b: Node, *, positive: bool) -> bool:
    """Return True if `a` is a constant multiple of `b`, so that `a = 0` and `b = 0` are equivalent.

    For inequalities the constant must be `positive`.
    """
    first: tuple[Number, Number, int] | None = None
    compared = 0
    for context in _contexts(a, b):
        if (pair := _pair(a, b, context, full=True)) is None:
            continue
        x, y, sure = pair
        sure = min(sure, first[2]) if first else sure
        with mp.workdps(sure + FIRST):
            if any(isinstance(v, mpmath.mpc) for v in (x, y)):
                continue
            if (x == 0) != (y == 0):
                return False
            if x == 0:
                continue
            if positive and (to_mp(x) > 0) != (to_mp(y) > 0):
                return False
            if first is None:
                first = pair
            elif not _close(_times(x, first[1]), _times(y, first[0]), sure - 10):
                return False
            compared += 1
    return compared >= (ENOUGH_POINTS if a.symbols | b.symbols else 1)


def is_near(a: Node, b: Node, error: Fraction) -> bool:
    """Return True if two constants surely differ by at most `error`."""
    if (pair := _pair(a, b, Context(), full=True)) is None:
        return False
    x, y, sure = pair
    with mp.workdps(sure + FIRST):
        x, y = to_mp(x), to_mp(y)
        noise = max(abs(x), abs(y)) * mpmath.mpf(10) ** -sure
        return bool(abs(x - y) + noise <= to_mp(error))


def _times(x: Number, y: Number) -> Number:
    return x * y if isinstance(x, Fraction) and isinstance(y, Fraction) else to_mp(x) * to_mp(y)


def _close(x: Number, y: Number, digits: int) -> bool:
    """Return True if so many digits of two numbers agree; zero is only equal to zero."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    x, y = to_mp(x), to_mp(y)
    return bool(abs(x - y) <= max(abs(x), abs(y)) * mpmath.mpf(10) ** -digits)


def _contexts(a: Node, b: Node, log_base: Fraction | None = None) -> Iterator[Context]:
    """Yield the points at which to compare."""
    symbols = sorted(a.symbols | b.symbols)
    if len(symbols) > 12:
        raise OverLimit(f"{len(symbols)} variables: over the limit of 12")
    if not symbols:
        yield Context(log_base=log_base)
        return
    integers = a.integer_symbols | b.integer_symbols
    if a.is_transcendental or b.is_transcendental:
        integers |= {s for s in symbols if s[0] in _INTEGER_NAMES}
    count = len(_INTEGERS) * min(len(integers), 2) or len(_REAL)
    for t, real in zip(range(count), cycle(_REAL)):
        values = {}
        for i, s in enumerate(symbols):
            steps = t * (i + 1) + 7 * i + t // len(_INTEGERS)
            integer = Fraction(_INTEGERS[steps % len(_INTEGERS)])
            values[s] = integer if s in integers else real[i % 5] + i // 5
        yield Context(values, log_base)


def _pair(a: Node, b: Node, context: Context, *, full: bool) -> tuple[Number, Number, int] | None:
    """Return both values at a point and their sure digits; None if a value is undefined.

    In `full`, there are enough digits to see every summand. Raises `OverLimit` if there cannot be.
    """
    digits = FIRST + SURE if full else FIRST
    while digits <= MOST:
        context.lost = context.spread = 0
        context.vanished = False
        sure = 0
        with mp.workdps(digits):
            try:
                x, y = (_without_noise(evaluate(n, context), context) for n in (a, b))
            except (Undefined, ZeroDivisionError, OverflowError):
                # A small difference may have vanished.
                if digits > FIRST or not context.vanished:
                    return None
                sure = -int(0.302 * (context.lost + context.spread))
            else:
                if isinstance(x, Fraction) and isinstance(y, Fraction) and not context.vanished:
                    return x, y, MOST
                if not all(isinstance(v, Fraction) or mpmath.isfinite(v) for v in (x, y)):
                    return None
                sure = digits - int(0.302 * (context.lost + GUARD_BITS))
        needed = SURE + int(0.302 * context.spread) if full else DIFFERENT
        if sure >= needed:
            return x, y, sure
        digits += max(needed - sure, FIRST)
    raise OverLimit(f"over {MOST} digits would be needed")


def _without_noise(x: Number, context: Context) -> Number:
    """Return a complex number whose imaginary part is rounding error as a real one."""
    if isinstance(x, mpmath.mpc):
        size = mpmath.mag(x) if x else 0
        if not context.settled(x.imag, size):
            return context.settled(x.real, size)
    return x


def _agree_in(a: Node, b: Node, log_base: Fraction | None) -> bool:
    for real in (True, False):
        compared, limit = 0, None
        for context in _contexts(a, b, log_base):
            try:
                agreed = _agree_at(a, b, context, real=real)
            except OverLimit as e:
                if not context.values:
                    raise
                agreed, limit = None, e
            if agreed is False:
                return False
            compared += agreed is True
        if compared >= (ENOUGH_POINTS if a.symbols | b.symbols else 1):
            return True
        if limit is not None:
            raise limit
    raise Undefined("the expressions have no values to compare")


def _agree_at(a: Node, b: Node, context: Context, *, real: bool) -> bool | None:
    """Return True if the values at a point are equal; None if one is undefined, or both unreal."""
    for full in (False, True):
        if (pair := _pair(a, b, context, full=full)) is None:
            return None
        if context.vanished and not full:
            continue  # e^{2000}+7-e^{2000} is no zero, but needs more digits
        x, y, sure = pair
        if real and (unreal := isinstance(x, mpmath.mpc)) | isinstance(y, mpmath.mpc):
            # ln|x| is no ln x: they differ in where they are real.
            return None if unreal and isinstance(y, mpmath.mpc) else False
        with mp.workdps(sure + FIRST):
            if not _close(x, y, sure - 2):
                return False
        if sure == MOST:
            return True
    return True
