"""Which points are fitted: R0, the skipped start, the limit, and the points held out.

Default rule for the start (`skip=None`): the first point is dropped as long as leaving it out,
alone (F-test at 5%) or with the next one or two (2%), improves the fit of the others under
correlated noise; at most a third of the points, and never below eight. The paper skips about 1.5k
GPU-hours, one epoch of its data; the rule needs no unit and keeps the early points of runs whose
start already follows the curve.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.stats import f as f_distribution

from .curve import FormName, Index, Mask, Shape
from .errors import DataError
from .noise import FLOOR, SHARE, covariance, whitener
from .series import Series
from .solve import Problem, solve

R0Choice = float | Literal["first", "fit"]
KEEP_AT_LEAST = 8
DROP_LEVELS = {1: 0.95, 2: 0.98, 3: 0.98}
"""Level of the test by the number of points that are left out together."""


@dataclass(frozen=True, slots=True)
class Window:
    """Points of a series by their part in the fit; masks are over the whole series [n]."""

    used: Mask
    skipped: Mask
    held_out: Mask
    r0: float | None
    """Fixed reward at zero compute; None when it is fitted, or unused (power law)."""
    r0_stderr: float | None
    r0_rule: str
    skip: float
    """Points up to this compute are left out."""
    skip_rule: str
    r0_at: float | None
    """Compute of the evaluation that R0 was taken from."""


def choose(
    series: Series,
    form: FormName,
    r0: R0Choice,
    skip: float | None,
    fit_until: float | None,
    fix_a: float | None,
    a_max: float,
) -> Window:
    """Apply R0, skip and limit to a series.

    Raises:
        DataError: nothing is left to fit, or an option is out of range.
    """
    c = series.compute
    usable = np.ones(len(c), dtype=bool)
    value, stderr, at, rule = _r0(series, form, r0)
    if at is not None or (c[0] == 0 and (form == "power-law" or r0 != "fit")):
        usable[0] = False
    limit = np.inf if fit_until is None else fit_until
    inside = usable & (c <= limit)
    held_out = usable & (c > limit)
    if skip is not None:
        start, skip_rule = skip, f"given: points up to {skip:g} are left out"
    else:
        start, skip_rule = _auto_skip(series, form, value, inside, fix_a, a_max)
    zero = inside & (c == 0)
    used = inside & ((c > start) | zero)
    window = Window(
        used, inside & ~used, held_out, value, stderr, rule, float(start), skip_rule, at
    )
    _check(series, window, form, r0, fix_a)
    return window


def _r0(
    series: Series, form: FormName, r0: R0Choice
) -> tuple[float | None, float | None, float | None, str]:
    """R0, its standard error, the compute it was read at, and the rule in words."""
    if form == "power-law":
        return None, None, None, "not used by the power law"
    if r0 == "fit":
        return None, None, None, "fitted"
    if r0 == "first":
        at = float(series.compute[0])
        rule = f"first evaluation, at compute {at:g}"
        stderr = None if series.stderr is None else float(series.stderr[0])
        return float(series.reward[0]), stderr, at, rule
    if not isinstance(r0, int | float) or not 0 <= float(r0) < 1:
        raise DataError(f"R0 is {r0!r}", "Give a pass rate in [0, 1), 'first' or 'fit'")
    return float(r0), None, None, "given"


def _auto_skip(
    series: Series,
    form: FormName,
    r0: float | None,
    inside: Mask,
    fix_a: float | None,
    a_max: float,
) -> tuple[float, str]:
    """Compute up to which the start contradicts the curve, and the rule in words."""
    rule = "automatic: a start that contradicts the curve of the rest (F-test)"
    index = np.flatnonzero(inside & (series.compute > 0))
    most = min(len(index) // 3, len(index) - KEEP_AT_LEAST)
    fits: dict[int, tuple[float, int]] = {}

    def fitted(leave: int) -> tuple[float, int]:
        if leave not in fits:
            fits[leave] = _sum_of_squares(series, form, r0, index[leave:], fix_a, a_max)
        return fits[leave]

    def contradicts(dropped: int, more: int, level: float) -> bool:
        rest, free = fitted(dropped + more)
        dof = len(index) - dropped - more - free
        if dof < 2:
            return False
        ratio = (fitted(dropped)[0] - rest) / more / max(rest / dof, FLOOR**2)
        return bool(ratio > f_distribution.ppf(level, more, dof))

    dropped, start = 0, 0.0
    while dropped < most and any(
        contradicts(dropped, more, level)
        for more, level in DROP_LEVELS.items()
        if dropped + more <= most
    ):
        start = float(series.compute[index[dropped]])
        dropped += 1
    points = "point" if dropped == 1 else "points"
    what = f"left out {dropped} {points} up to {start:g}" if dropped else "nothing left out"
    return start, f"{rule}; {what}"


def _sum_of_squares(
    series: Series,
    form: FormName,
    r0: float | None,
    index: Index,
    fix_a: float | None,
    a_max: float,
) -> tuple[float, int]:
    """Least sum of squares under correlated noise, and the number of parameters."""
    p = problem(series, form, r0, index, fix_a, a_max)
    stderr = None if series.stderr is None else series.stderr[index]
    white = whitener(covariance(series.compute[index], SHARE, stderr))
    p = replace(p, white=white)
    return solve(p).s, p.free


def problem(
    series: Series,
    form: FormName,
    r0: float | None,
    index: Index,
    fix_a: float | None,
    a_max: float,
) -> Problem:
    """Least-squares problem of some points, weighted by their standard errors where known."""
    c = series.compute[index]
    shape = Shape(form, float(c.max()), float(c[c > 0].min()))
    white = np.eye(len(c))
    if series.stderr is not None:
        s = series.stderr[index]
        white = np.diag(np.sqrt(np.mean(s**2)) / s)
    return Problem(shape, shape.x(c), series.reward[index], white, r0, fix_a, a_max)


def _check(
    series: Series, window: Window, form: FormName, r0: R0Choice, fix_a: float | None
) -> None:
    """Refuse windows that cannot be fitted."""
    n = int(window.used.sum())
    free = 2 + (form != "power-law") - (fix_a is not None)
    free += int(form == "power-law" or r0 == "fit")
    if n < free + 1:
        limits = f"{int(window.skipped.sum())} skipped, {int(window.held_out.sum())} held out"
        raise DataError(
            f"{n} points in the window for {free} parameters ({limits})",
            "Give more evaluations, a smaller --skip, a larger --fit-until, or fix R0 or A",
            file=series.source,
        )
    y = series.reward[window.used]
    if float(np.ptp(y)) == 0:
        raise DataError(
            f"the reward is constant ({y[0]:g}) in the window",
            "A curve needs a reward that changes; check the reward column",
            file=series.source,
        )
