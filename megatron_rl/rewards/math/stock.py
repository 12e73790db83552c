"""math-verify for what the reader of this package does not read: sums, integrals, limits.

The whole answer must be one LaTeX formula to it; no number is taken out of the rest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from megatron_rl.rewards.base import VerifierDown
from megatron_rl.rewards.math.node import OverLimit, Unreadable
from megatron_rl.rewards.math.numeric import same_number

_COMMANDS = re.compile(
    r"\\(?:sum|prod|int|iint|oint|lim|setminus|cap|complement|det|operatorname|partial|nabla|Re|Im|arcsec)"
    r"(?![A-Za-z])|\\begin\{"
)
# Sums and products of this many terms would be computed one by one.
_MANY_TERMS = re.compile(
    r"\\(?:sum|prod)(?![A-Za-z]).*?\^\s*\{?\s*(?:\d{5,}|\d+\s*(?:\\times\s*\d+\s*)?[\^!])"
)

_EASY_DEGREE = 20


def _unlimited() -> object:
    """Outside a worker nothing limits math-verify."""
    return None


begin: Callable[[], object] = _unlimited
"""Called before math-verify computes; a worker sets it, to limit the time."""


_WARM_UP = (
    (r"\sum_{k=1}^{n} k^2", r"\frac{n}{2}"),
    (r"\int_0^1 x^2 dx", r"\frac{1}{3}"),
    (r"\lim_{x\to 0}\frac{\sin x}{\arctan x}", "5"),
)
_WARM_UP_READING = (
    r"\int_0^{\infty} \frac{\sin(x^{x^x})}{\ln(1+\sqrt{\tan x})} e^{-x^{2}} dx",
    r"\int_0^{2\pi} \sqrt{1+\cos^2 x} dx",
    r"\lim_{x\to 0}\frac{\sin(\tan x)-\tan(x)}{\arctan(\arcsin x)}",
    r"\int_0^1 \frac{\ln(1+x)}{1+x^2} dx",
)
"""The grammar's reader is slow at constructs that it has not met before."""


def warm_up() -> None:
    """Load math-verify and its grammar (seconds), so that no verdict's time limit pays for it.

    Raises:
        VerifierDown: math-verify is not installed.
    """
    for answer, gold in _WARM_UP:
        verify(answer, gold)
    for text in _WARM_UP_READING:
        _parse(text)


def is_asked(text: str) -> bool:
    """Whether a normalized text has what math-verify is for."""
    return _COMMANDS.search(text) is not None


def verify(answer: str, gold: str) -> bool | None:
    """math-verify's word on two normalized texts; None where it has none.

    Raises:
        VerifierDown: math-verify is not installed.
    """
    if not (is_asked(answer) or is_asked(gold)):
        return None
    for text in (answer, gold):
        if _MANY_TERMS.search(text):
            raise OverLimit(f"too many terms in {text[:60]}")
    try:
        import sympy
        from math_verify import verify as stock_verify
    except ImportError as e:
        raise VerifierDown(f"math-verify is missing ({e}): install megatron_rl[rewards]") from e
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    begin()
    try:
        sides = [_parse(text) for text in (gold, answer)]
    except Unreadable:
        return None
    if any(not isinstance(s, sympy.Basic | sympy.MatrixBase) for s in sides):
        return None
    sides = [_summed(side) for side in sides]
    decided = same_number(sides[0], sides[1])
    if decided is not None:
        return decided
    # No signals here: the worker is under a hard time-out, and may run in any thread.
    return bool(stock_verify(sides[0], sides[1], timeout_seconds=None))


def _summed(side: Any) -> Any:
    """With sums of polynomials in closed form: math-verify would sum them numerically, slowly."""
    import sympy

    def is_easy(part: Any) -> bool:
        if not isinstance(part, sympy.Sum) or not part.function.is_polynomial(*part.variables):
            return False
        return sympy.total_degree(part.function, *part.variables) <= _EASY_DEGREE

    return side.replace(is_easy, lambda part: part.doit())


def _parse(text: str) -> Any:
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex

    settings = NormalizationConfig(
        basic_latex=True,
        units=False,
        malformed_operators=True,
        nits=True,
        boxed="none",
        equations=False,
    )
    normalized = normalize_latex(text.replace("\\times", "\\cdot"), settings)
    try:
        return latex2sympy(
            normalized, is_real=True, convert_degrees=False, normalization_config=None
        )
    except Exception as e:  # noqa: BLE001 - its parser raises bare Exception for bad LaTeX
        raise Unreadable(f"math-verify cannot read it: {str(e)[:80]}") from None
