"""The points that are fitted: R0, the skipped start, the limit, and the held-out points.

Default rule for the start (`skip=None`): the first point is dropped as long as leaving it out,
by itself (F-test at 5%) or with the next one or two (2%), improves the fit of the others under
correlated noise; at most a third of the points, and never below eight.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.stats import f as f_distribution

from .curve import Mask, Shape
from .errors import PointsError
from .options import FitOptions
from .series import FLOOR, SHARE, Series, covariance, whitener
from .solve import FitProblem, solve

KEEP_AT_LEAST = 8
DROP_LEVELS = {1: 0.95, 2: 0.98, 3: 0.98}  # level of the test by the number of points left out


@dataclass(frozen=True, slots=True)
class Window:
    """Points of a series by their role in the fit; masks are over all points [n]."""

    used: Mask
    skipped: Mask
    held_out: Mask
    r0: float | None  # fixed reward at zero compute; None when it is fitted, or unused (power law)
    skip: float  # points up to this compute are left out


def choose_window(series: Series, options: FitOptions) -> Window:
    """Apply R0, skip and limit to a series.

    Raises:
        PointsError: too few points are left, or their reward is constant.
    """
    c = series.compute
    sigmoid = options.form != "power-law"
    r0 = float(options.r0) if sigmoid and options.r0 != "fit" else None
    held_out = c > (np.inf if options.fit_until is None else options.fit_until)
    # An evaluation at compute 0 measures R0: a point like the others if R0 is fitted, else none.
    start = (c == 0) & (sigmoid and r0 is None)
    inside = ~held_out & ((c > 0) | start)
    if options.skip is not None:
        skip = float(options.skip)
    elif options.skip_epochs is None:
        skip = _choose_skip(series, options, r0, inside)
    elif series.epoch is not None:
        skip = float(c[series.epoch <= options.skip_epochs].max(initial=0.0))
    else:
        problem = "no epochs are known, so the first ones cannot be left out"
        remedy = "Give --skip, a run's metrics.jsonl, or a column 'epoch'"
        raise PointsError(problem, remedy, file=series.source)
    used = inside & ((c > skip) | start)
    skipped, n = ~used & ~held_out, int(used.sum())
    free = 2 + sigmoid + (r0 is None) - (options.fix_a is not None)
    if n < free + 1:
        limits = f"{int(skipped.sum())} skipped, {int(held_out.sum())} held out"
        problem = f"{n} points in the window for {free} parameters ({limits})"
        remedy = "Give more evaluations, a smaller --skip, a larger --fit-until, or fix R0 or A"
        raise PointsError(problem, remedy, file=series.source)
    y = series.reward[used]
    if float(np.ptp(y)) == 0:
        remedy = "A curve needs a reward that changes; check the reward column"
        problem = f"the reward is constant ({y[0]:g}) in the window"
        raise PointsError(problem, remedy, file=series.source)
    return Window(used, skipped, held_out, r0, skip)


def _choose_skip(series: Series, options: FitOptions, r0: float | None, inside: Mask) -> float:
    """Return the compute up to which the start contradicts the curve."""
    c = series.compute
    positive = c[inside & (c > 0)]
    most = min(len(positive) // 3, len(positive) - KEEP_AT_LEAST)

    @cache
    def fit_without(dropped: int) -> tuple[float, int]:
        """Return the least sum of squares under correlated noise, and its degrees of freedom."""
        kept = series.take(inside & ((c == 0) | (c >= positive[dropped])))
        white = whitener(covariance(kept.compute, SHARE, kept.stderr))
        p = replace(make_problem(kept, options, r0), white=white)
        return solve(p).s, p.dof

    def contradicts(dropped: int, more: int, level: float) -> bool:
        rest, dof = fit_without(dropped + more)
        ratio = (fit_without(dropped)[0] - rest) / more / max(rest / dof, FLOOR**2)
        return bool(ratio > f_distribution.ppf(level, more, dof))

    dropped = 0
    while any(
        dropped + more <= most and contradicts(dropped, more, level)
        for more, level in DROP_LEVELS.items()
    ):
        dropped += 1
    return float(positive[dropped - 1]) if dropped else 0.0


def make_problem(points: Series, options: FitOptions, r0: float | None) -> FitProblem:
    """Return the least-squares problem of some points, weighted by standard errors if known."""
    c, s = points.compute, points.stderr
    shape = Shape(options.form, float(c.max()), float(c[c > 0].min()))
    white = np.eye(len(c)) if s is None else np.diag(np.sqrt(np.mean(s**2)) / s)
    return FitProblem(shape, shape.x(c), points.reward, white, r0, options.fix_a, options.a_max)
