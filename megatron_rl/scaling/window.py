"""The points that are fitted: R0, the skipped start, the limit, and the held-out points.

Default rule for the start (`skip=None`): the first point is dropped as long as leaving it out,
by itself (F-test at 5%) or with the next one or two (2%), improves the fit of the others under
correlated noise; at most a third of the points, and never below eight. The paper skips about 1.5k
GPU-hours, one epoch of its data; the rule needs no unit and keeps the early points of runs that
follow the curve from the start.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.stats import f as f_distribution

from .curve import Mask, Shape
from .errors import PointsError
from .noise import FLOOR, SHARE, covariance, whitener
from .options import FitOptions
from .series import Series
from .solve import FitProblem, solve

KEEP_AT_LEAST = 8
DROP_LEVELS = {1: 0.95, 2: 0.98, 3: 0.98}
"""Level of the test by the number of points that are left out together."""


@dataclass(frozen=True, slots=True)
class Window:
    """Points of a series by their role in the fit; masks are over all points [n]."""

    used: Mask
    skipped: Mask
    held_out: Mask
    r0: float | None
    """Fixed reward at zero compute; None when it is fitted, or unused (power law)."""
    r0_stderr: float | None
    r0_at: float | None
    """Compute of the evaluation that R0 was taken from."""
    r0_rule: str
    skip: float
    """Points up to this compute are left out."""
    skip_rule: str


def choose_window(series: Series, options: FitOptions) -> Window:
    """Apply R0, skip and limit to a series.

    Raises:
        PointsError: too few points are left, or their reward is constant.
    """
    c = series.compute
    r0, r0_stderr, r0_at, r0_rule = _choose_r0(series, options)
    usable = np.ones(len(c), dtype=bool)
    zero_unused = options.form == "power-law" or options.r0 != "fit"
    if r0_at is not None or (c[0] == 0 and zero_unused):
        usable[0] = False
    limit = np.inf if options.fit_until is None else options.fit_until
    inside = usable & (c <= limit)
    if options.skip is not None:
        skip, skip_rule = options.skip, f"given: points up to {options.skip:g} are left out"
    else:
        skip, skip_rule = _choose_skip(series, options, r0, inside)
    used = inside & ((c > skip) | (c == 0))
    skipped, held_out = inside & ~used, usable & (c > limit)
    window = Window(used, skipped, held_out, r0, r0_stderr, r0_at, r0_rule, float(skip), skip_rule)
    _check_window(series, window, options)
    return window


def _choose_r0(
    series: Series, options: FitOptions
) -> tuple[float | None, float | None, float | None, str]:
    """Return R0, its standard error, the compute of its evaluation, and the rule in words."""
    if options.form == "power-law":
        return None, None, None, "not used by the power law"
    if options.r0 == "fit":
        return None, None, None, "fitted"
    if options.r0 == "first":
        at = float(series.compute[0])
        stderr = None if series.stderr is None else float(series.stderr[0])
        return float(series.reward[0]), stderr, at, f"first evaluation, at compute {at:g}"
    return float(options.r0), None, None, "given"


def _choose_skip(
    series: Series, options: FitOptions, r0: float | None, inside: Mask
) -> tuple[float, str]:
    """Return the compute up to which the start contradicts the curve, and the rule in words."""
    points = series.take(inside & (series.compute > 0))
    n = len(points)
    most = min(n // 3, n - KEEP_AT_LEAST)

    @cache
    def fit_without(dropped: int) -> tuple[float, int]:
        """Return the least sum of squares under correlated noise, and its degrees of freedom."""
        kept = points.take(slice(dropped, None))
        white = whitener(covariance(kept.compute, SHARE, kept.stderr))
        p = replace(make_problem(kept, options, r0), white=white)
        return solve(p).s, p.dof

    def contradicts(dropped: int, more: int, level: float) -> bool:
        rest, dof = fit_without(dropped + more)
        if dof < 2:
            return False
        ratio = (fit_without(dropped)[0] - rest) / more / max(rest / dof, FLOOR**2)
        return bool(ratio > f_distribution.ppf(level, more, dof))

    dropped, skip = 0, 0.0
    while dropped < most and any(
        contradicts(dropped, more, level)
        for more, level in DROP_LEVELS.items()
        if dropped + more <= most
    ):
        skip = float(points.compute[dropped])
        dropped += 1
    noun = "point" if dropped == 1 else "points"
    result = f"left out {dropped} {noun} up to {skip:g}" if dropped else "nothing left out"
    rule = "automatic: a start that contradicts the curve of the rest (F-test)"
    return skip, f"{rule}; {result}"


def make_problem(points: Series, options: FitOptions, r0: float | None) -> FitProblem:
    """Return the least-squares problem of some points, weighted by standard errors if known."""
    c, s = points.compute, points.stderr
    shape = Shape(options.form, float(c.max()), float(c[c > 0].min()))
    white = np.eye(len(c)) if s is None else np.diag(np.sqrt(np.mean(s**2)) / s)
    return FitProblem(shape, shape.x(c), points.reward, white, r0, options.fix_a, options.a_max)


def _check_window(series: Series, window: Window, options: FitOptions) -> None:
    n = int(window.used.sum())
    free = 2 + (options.form != "power-law") + (window.r0 is None) - (options.fix_a is not None)
    if n < free + 1:
        limits = f"{int(window.skipped.sum())} skipped, {int(window.held_out.sum())} held out"
        problem = f"{n} points in the window for {free} parameters ({limits})"
        remedy = "Give more evaluations, a smaller --skip, a larger --fit-until, or fix R0 or A"
        raise PointsError(problem, remedy, file=series.source)
    y = series.reward[window.used]
    if float(np.ptp(y)) == 0:
        remedy = "A curve needs a reward that changes; check the reward column"
        problem = f"the reward is constant ({y[0]:g}) in the window"
        raise PointsError(problem, remedy, file=series.source)
