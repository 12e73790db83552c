"""math-verify for formulas that this package does not parse: sums, integrals, limits.

The whole answer must be one LaTeX formula; no number is extracted from other text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from megatron_rl.rewards.base import VerifierDown
from megatron_rl.rewards.math.node import OverLimit, Unreadable

_COMMANDS = re.compile(
    r"\\(?:sum|prod|int|iint|oint|lim|setminus|cap|complement|det|operatorname|partial|nabla|Re|Im"
    r"|arcsec)(?![A-Za-z])|\\begin\{"
)
# Sums and products of so many terms would be computed term by term.
_MANY_TERMS = re.compile(
    r"\\(?:sum|prod)(?![A-Za-z]).*?\^\s*\{?\s*(?:\d{5,}|\d+\s*(?:\\times\s*\d+\s*)?[\^!])"
)
_EASY_DEGREE = 20

begin: Callable[[], object] = lambda: None  # noqa: E731
"""Called before math-verify computes; a worker sets it to limit the time."""

_WARM_UP = (
    (r"\sum_{k=1}^{n} k^2", r"\frac{n}{2}"),
    (r"\int_0^1 x^2 dx", r"\frac{1}{3}"),
    (r"\lim_{x\to 0}\frac{\sin x}{\arctan x}", "5"),
)
_WARM_UP_PARSER = (
    r"\int_0^{\infty} \frac{\sin(x^{x^x})}{\ln(1+\sqrt{\tan x})} e^{-x^{2}} dx",
    r"\int_0^{2\pi} \sqrt{1+\cos^2 x} dx",
    r"\lim_{x\to 0}\frac{\sin(\tan x)-\tan(x)}{\arctan(\arcsin x)}",
    r"\int_0^1 \frac{\ln(1+x)}{1+x^2} dx",
)
"""The grammar's parser is slow at the first occurrence of a construct."""


def warm_up() -> None:
    """Load math-verify and its grammar (seconds), before any verdict's time limit.

    Raises:
        VerifierDown: math-verify is not installed.
    """
    for answer, gold in _WARM_UP:
        verify(answer, gold)
    for text in _WARM_UP_PARSER:
        _parse(text)


def handles(text: str) -> bool:
    """Return True if a normalized text has a construct that is left to math-verify."""
    return _COMMANDS.search(text) is not None


def verify(answer: str, gold: str) -> bool | None:
    """Compare two normalized texts by math-verify; None if it cannot decide.

    Raises:
        VerifierDown: math-verify is not installed.
    """
    if not (handles(answer) or handles(gold)):
        return None
    for text in (answer, gold):
        if _MANY_TERMS.search(text):
            raise OverLimit(f"too many terms in {text[:60]}")
    try:
        import sympy
        from math_verify import verify as stock_verify

        from megatron_rl.rewards.math.numeric import same_number
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
    # No timeout by signals: the worker has a hard limit, and this may run in any thread.
    return bool(stock_verify(sides[0], sides[1], timeout_seconds=None))


def _summed(side: Any) -> Any:
    """Put sums of polynomials in closed form; math-verify would sum them numerically, slowly."""
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
        raise Unreadable(f"math-verify cannot parse it: {str(e)[:80]}") from None
