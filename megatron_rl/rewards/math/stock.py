"""math-verify for formulas that this package does not parse: sums, integrals, limits.

The whole answer must be one LaTeX formula; no number is extracted from other text. Definite
integrals and limits of constants, for which algebra may take seconds, are first compared by their
numerical values. A value counts only if it is certain: the quadrature over a bounded interval
converges, or the limit agrees at two points close to it (or far out).

Importing this module takes seconds.
"""

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mpmath
from mpmath import mp

from megatron_rl.rewards.base import VerifierDown
from megatron_rl.rewards.math.node import OverLimit, Unreadable

try:
    import math_verify
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
except ImportError as e:
    raise VerifierDown(f"math-verify is missing ({e}): install megatron_rl[rewards]") from e

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
# Sums and products of so many terms would be computed term by term.
_MANY_TERMS = re.compile(
    r"\\(?:sum|prod)(?![A-Za-z]).*?\^\s*\{?\s*(?:\d{5,}|\d+\s*(?:\\times\s*\d+\s*)?[\^!])"
)
_EASY_DEGREE = 20
QUADRATURE = ((15, 1e-6), (30, 1e-20))
"""(digits, relative error to reach) of integrals, coarse to fine."""
LIMIT_DIGITS = 400
NEAR, FAR = (20, 30), (0, 1)
"""A limit is evaluated 10^-20 and 10^-30 from its point, or at 10^20 and 10^30 + 1 (odd)."""
STEADY = 1e-12  # largest relative difference of a limit's two values
DIFFERENT, SAME = 1e-4, 1e-15
"""Relative differences above which two values differ, and below which they are equal."""

begin: Callable[[], object] = lambda: None  # noqa: E731
"""Called before math-verify computes; a worker sets it to limit the time."""

_WARM_UP = (
    (r"\sum_{k=1}^{n} k^2", r"\frac{n}{2}"),
    (r"\int_0^1 x^2 dx", r"\frac{1}{3}"),
    (r"\lim_{x\to 0}\frac{\sin x}{\arctan x}", "5"),
    (r"y=c_1 e^{3t}\begin{pmatrix}2\\1\end{pmatrix}", r"y=e^t c\begin{pmatrix}1\\2\end{pmatrix}"),
)
_WARM_UP_PARSER = (
    r"\int_0^{\infty} \frac{\sin(x^{x^x})}{\ln(1+\sqrt{\tan x})} e^{-x^{2}} dx",
    r"\int_0^{2\pi} \sqrt{1+\cos^2 x} dx",
    r"\lim_{x\to 0}\frac{\sin(\tan x)-\tan(x)}{\arctan(\arcsin x)}",
    r"\int_0^1 \frac{\ln(1+x)}{1+x^2} dx",
)
"""The grammar's parser is slow at the first occurrence of a construct."""


def warm_up() -> None:
    """Load math-verify and its grammar (seconds), before any verdict's time limit."""
    for answer, gold in _WARM_UP:
        verify(answer, gold)
    for text in _WARM_UP_PARSER:
        _parse(text)


def verify(answer: str, gold: str) -> bool | None:
    """Compare two normalized texts by math-verify; None if it cannot decide."""
    for text in (answer, gold):
        if _MANY_TERMS.search(text):
            raise OverLimit(f"too many terms in {text[:60]}")
    begin()
    try:
        sides = [_parse(text) for text in (gold, answer)]
    except Unreadable:
        return None
    if not all(isinstance(s, sympy.Basic | sympy.MatrixBase) for s in sides):
        return None
    if any(isinstance(s, sympy.Rel) and s.has(sympy.MatrixBase, sympy.MatrixExpr) for s in sides):
        # math-verify takes all of these for equal: y = (1, 2)^T is y = (2, 1)^T.
        if not all(isinstance(s, sympy.Rel) and s.lhs.is_Symbol for s in sides):
            return None
        if len({(s.func, s.lhs) for s in sides}) > 1:
            return None
        sides = [s.rhs for s in sides]
    sides = [_summed(side) for side in sides]
    if (decided := same_number(*sides)) is not None:
        return decided
    # No timeout by signals: the worker has a hard limit, and this may run in any thread.
    return bool(math_verify.verify(*sides, timeout_seconds=None))


def _summed(side: Any) -> Any:
    """Put sums of polynomials in closed form; math-verify would sum them numerically, slowly."""

    def is_easy(part: Any) -> bool:
        polynomial = isinstance(part, sympy.Sum) and part.function.is_polynomial(*part.variables)
        return polynomial and sympy.total_degree(part.function, *part.variables) <= _EASY_DEGREE

    return side.replace(is_easy, lambda part: part.doit())


@lru_cache(maxsize=256)  # a gold answer meets many answers, and its grammar is slow
def _parse(text: str) -> Any:
    steps = {"basic_latex": True, "malformed_operators": True, "nits": True, "boxed": "none"}
    settings = NormalizationConfig(**steps, units=False, equations=False)
    text = normalize_latex(text.replace("\\times", "\\cdot"), settings)
    try:
        return latex2sympy(text, is_real=True, convert_degrees=False, normalization_config=None)
    except Exception as e:  # noqa: BLE001 - its parser raises bare Exception for bad LaTeX
        raise Unreadable(f"math-verify cannot parse it: {str(e)[:80]}") from None


def same_number(gold: Any, answer: Any) -> bool | None:
    """Compare two sympy constants with integrals or limits; None if the result is not certain."""
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
                a, b = (sympy.lambdify((), s.xreplace(values), "mpmath")() for s in sides)
                # Relative, except that a limit may only come close to zero.
                error = abs(a - b) / (max(abs(a), abs(b)) if a and b else 1)
                if not mpmath.isfinite(error):
                    return None
        except (TypeError, ValueError, NameError, ArithmeticError):
            return None
        if error > DIFFERENT:
            return False
    return True if error < SAME else None


def _value(part: Any, digits: int, tolerance: float) -> Any:
    if part.args[0].has(sympy.Integral, sympy.Limit):
        raise ValueError("nested integrals or limits")
    if isinstance(part, sympy.Limit):
        with mp.workdps(LIMIT_DIGITS):
            return _limit(part)
    with mp.workdps(digits):
        return _integral(part, tolerance)


def _integral(integral: Any, tolerance: float) -> Any:
    if len(integral.limits) != 1 or len(integral.limits[0]) != 3:
        raise ValueError("not one definite integral")
    variable, *ends = integral.limits[0]
    if not all(e.is_finite and e.is_real for e in ends):
        raise ValueError("a tail that may oscillate or fall slowly")
    function = sympy.lambdify(variable, integral.function, "mpmath")
    low, high = (mpmath.mpmathify(e.evalf(mpmath.mp.dps)) for e in ends)
    value, error = mpmath.quad(function, [low, high], error=True)
    if not mpmath.isfinite(value) or error > tolerance * max(1, abs(value)):
        raise ValueError("no convergence")
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
        raise ValueError("the two values differ")
    return sympy.sympify(second)
