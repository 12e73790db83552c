"""Numerical values of definite integrals and limits, for which algebra may take seconds.

A value counts only if it is certain: an integral over a bounded interval whose quadrature
converges, a limit that agrees at two points close to it (or far out). Anything else is left to
algebra.
"""

from __future__ import annotations

from typing import Any

import mpmath
import sympy
from mpmath import mp

QUADRATURE = ((15, 1e-6), (30, 1e-20))
"""(digits, relative error to reach) of integrals, coarse to fine."""
LIMIT_DIGITS = 400
NEAR, FAR = (20, 30), (0, 1)
"""A limit is evaluated 10^-20 and 10^-30 from its point, or at 10^20 and 10^30 + 1 (odd)."""
STEADY = 1e-12
"""Largest relative difference of a limit's two values."""
DIFFERENT, SAME = 1e-4, 1e-15
"""Relative differences above which two values differ, and below which they are equal."""


class _Uncertain(ValueError):
    """The value is not certain."""


def same_number(gold: Any, answer: Any) -> bool | None:
    """Compare two sympy constants with integrals or limits; None if the result is not certain.

    Args:
        gold: sympy expression.
        answer: sympy expression.
    """
    sides = (gold, answer)
    if not all(isinstance(s, sympy.Expr) and not s.free_symbols for s in sides):
        return None
    parts = {p for side in sides for p in side.atoms(sympy.Integral, sympy.Limit)}
    others = (sympy.Sum, sympy.Product, sympy.Derivative)
    if not parts or any(s.has(*others) for s in sides):
        return None
    error = 1.0
    for digits, tolerance in QUADRATURE:
        try:
            values = {p: _value(p, digits, tolerance) for p in parts}
            with mp.workdps(digits):
                a, b = (_number(side.xreplace(values), digits) for side in sides)
                error = abs(a - b) / max(1, abs(a), abs(b))
        except (_Uncertain, TypeError, ValueError, NameError, ArithmeticError):
            return None
        if error > DIFFERENT:
            return False
    return True if error < SAME else None


def _value(part: Any, digits: int, tolerance: float) -> Any:
    if part.args[0].has(sympy.Integral, sympy.Limit):
        raise _Uncertain("nested integrals or limits")
    if isinstance(part, sympy.Limit):
        with mp.workdps(LIMIT_DIGITS):
            return _limit(part)
    with mp.workdps(digits):
        return _integral(part, tolerance)


def _integral(integral: Any, tolerance: float) -> Any:
    if len(integral.limits) != 1 or len(integral.limits[0]) != 3:
        raise _Uncertain("not one definite integral")
    variable, *ends = integral.limits[0]
    if not all(e.is_finite and e.is_real for e in ends):
        raise _Uncertain("a tail that may oscillate or fall slowly")
    function = sympy.lambdify(variable, integral.function, "mpmath")
    low, high = (mpmath.mpmathify(e.evalf(mpmath.mp.dps)) for e in ends)
    value, error = mpmath.quad(function, [low, high], error=True)
    if not mpmath.isfinite(value) or error > tolerance * max(1, abs(value)):
        raise _Uncertain("no convergence")
    return sympy.sympify(value)


def _limit(limit: Any) -> Any:
    expression, variable, point, direction = limit.args
    function = sympy.lambdify(variable, expression, "mpmath")
    if point in (sympy.oo, -sympy.oo):
        sign = 1 if point == sympy.oo else -1
        points = [sign * (mpmath.mpf(10) ** n + odd) for n, odd in zip(NEAR, FAR, strict=True)]
    else:
        sign = -1 if str(direction) == "-" else 1
        at = mpmath.mpmathify(point.evalf(LIMIT_DIGITS))
        points = [at + sign * mpmath.mpf(10) ** -n for n in NEAR]
    first, second = (mpmath.mpmathify(function(p)) for p in points)
    if not mpmath.isfinite(second) or abs(first - second) > STEADY * max(1, abs(second)):
        raise _Uncertain("the two values differ")
    return sympy.sympify(second)


def _number(expression: Any, digits: int) -> Any:
    value = expression.evalf(digits)
    real, imaginary = value.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        raise _Uncertain("not a number")
    return mpmath.mpc(mpmath.mpmathify(real), mpmath.mpmathify(imaginary))
