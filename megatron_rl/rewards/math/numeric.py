"""Values of definite integrals and limits by numbers, where algebra may take seconds.

A value counts only when it is certain: an integral over a bounded interval whose quadrature
converges, a limit that does not move between two points close to it (or far out). What stays open
is left to algebra.
"""

from __future__ import annotations

from typing import Any

QUADRATURE = ((15, 1e-6), (30, 1e-20))
"""(digits, relative error that must be reached) of integrals, coarse to fine."""
LIMIT_DIGITS = 400
NEAR, FAR = (20, 30), (0, 1)
"""A limit is taken at 10^-20 and 10^-30 beside its point, or at 10^20 and 10^30 + 1 (odd)."""
STEADY = 1e-12
"""Relative difference of a limit's two values."""
DIFFERENT, SAME = 1e-4, 1e-15
"""Relative differences from which, and up to which, two values are told apart or taken as one."""


class _Open(ValueError):
    """A value that is not certain."""


def same_number(gold: Any, answer: Any) -> bool | None:
    """Whether two sympy constants with integrals or limits have one value; None if it stays open.

    Args:
        gold: sympy expression.
        answer: sympy expression.
    """
    import sympy
    from mpmath import mp

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
        except (_Open, TypeError, ValueError, NameError, ArithmeticError):
            return None
        if error > DIFFERENT:
            return False
    return True if error < SAME else None


def _value(part: Any, digits: int, tolerance: float) -> Any:
    import sympy
    from mpmath import mp

    if part.args[0].has(sympy.Integral, sympy.Limit):
        raise _Open("one inside another")
    if isinstance(part, sympy.Limit):
        with mp.workdps(LIMIT_DIGITS):
            return _limit(part)
    with mp.workdps(digits):
        return _integral(part, tolerance)


def _integral(integral: Any, tolerance: float) -> Any:
    """Raises `_Open` where it is none over one bounded interval, or does not converge."""
    import mpmath
    import sympy

    if len(integral.limits) != 1 or len(integral.limits[0]) != 3:
        raise _Open("not one definite integral")
    variable, *ends = integral.limits[0]
    if not all(e.is_finite and e.is_real for e in ends):
        raise _Open("a tail that may oscillate or fall slowly")
    function = sympy.lambdify(variable, integral.function, "mpmath")
    low, high = (mpmath.mpmathify(e.evalf(mpmath.mp.dps)) for e in ends)
    value, error = mpmath.quad(function, [low, high], error=True)
    if not mpmath.isfinite(value) or error > tolerance * max(1, abs(value)):
        raise _Open("no convergence")
    return sympy.sympify(value)


def _limit(limit: Any) -> Any:
    """Raises `_Open` where it is none of a function of one variable, or the values move."""
    import mpmath
    import sympy

    expression, variable, point, direction = limit.args
    function = sympy.lambdify(variable, expression, "mpmath")
    if point in (sympy.oo, -sympy.oo):
        sign = 1 if point == sympy.oo else -1
        places = [sign * (mpmath.mpf(10) ** n + odd) for n, odd in zip(NEAR, FAR, strict=True)]
    else:
        sign = -1 if str(direction) == "-" else 1
        at = mpmath.mpmathify(point.evalf(LIMIT_DIGITS))
        places = [at + sign * mpmath.mpf(10) ** -n for n in NEAR]
    first, second = (mpmath.mpmathify(function(p)) for p in places)
    if not mpmath.isfinite(second) or abs(first - second) > STEADY * max(1, abs(second)):
        raise _Open("no steady value")
    return sympy.sympify(second)


def _number(expression: Any, digits: int) -> Any:
    """An expression's value as mpmath's number.

    Raises:
        _Open: it has none.
    """
    import mpmath

    value = expression.evalf(digits)
    real, imaginary = value.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        raise _Open("no number")
    return mpmath.mpc(mpmath.mpmathify(real), mpmath.mpmathify(imaginary))
