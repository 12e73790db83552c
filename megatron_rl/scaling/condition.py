"""Warnings of a fit.

A fit with a serious warning is ill-conditioned: `well_conditioned` is False and `--strict` exits
with code 3.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .fit_result import Fit, FitWarning, amount
from .paper import paper_grid
from .solve import solve

WIDE_A = 0.05
"""Largest width of the interval of A without a warning (the run-to-run margin is 0.02)."""
R0_SHIFT = 0.02
"""Largest change of A over the interval of an R0 that no evaluation shows, without a warning."""
FEW_POINTS = 7
FEW_BEYOND = 3
SERIOUS = {
    "ends_before_cmid": "the data end before half of the gain: A is extrapolated from its start",
    "few_beyond_cmid": f"fewer than {FEW_BEYOND} points lie beyond Cmid",
    "wide_a": f"the interval of A is wider than {WIDE_A}",
    "no_gain": "A is not above R0 by more than the noise",
    "r0_unknown": "the data begin after R0, and A depends on it: give --r0, the pass rate at 0",
    "few_points": f"fewer than {FEW_POINTS} points in the window",
    "a_at_bound": "A is at a bound of its range: the data determine no asymptote",
    "b_at_bound": "B is at a bound of its range: the data do not show the rise",
    "cmid_at_bound": "Cmid is at a bound of its range: the data do not contain the rise",
}
"""Warnings that make a fit ill-conditioned."""
REMARKS = {
    "falls_at_start": "the first evaluation is above the next ones: check it, or give --skip",
    "correlated": "neighboring residuals are correlated; the intervals allow for it",
    "skipped": "early points were left out",
}
MEANINGS = SERIOUS | REMARKS


def find_warnings(f: Fit) -> tuple[FitWarning, ...]:
    """Return the warnings of a fit, serious ones first: their meaning, and its numbers."""
    facts = dict((*_shape(f), *_bounds(f), *_points(f)))
    return tuple(
        FitWarning(code, f"{meaning} ({facts[code]})", code in SERIOUS)
        for code, meaning in MEANINGS.items()
        if code in facts
    )


def _shape(f: Fit) -> Iterator[tuple[str, str]]:
    """Yield code and numbers of the reasons why the data do not determine the curve."""
    a, point, unit = f.A, f.point, f.unit
    used = f.series.compute[f.window.used]
    first, last = amount(float(used[0])), amount(float(used[-1]))
    if f.Cmid is not None:
        beyond, cmid = int((used > f.Cmid.value).sum()), amount(f.Cmid.value)
        if beyond == 0:
            yield "ends_before_cmid", f"at {last} {unit}, Cmid is {cmid}"
        elif beyond < FEW_BEYOND:
            yield "few_beyond_cmid", f"{beyond}; Cmid is {cmid} {unit}"
    if f.n < FEW_POINTS:
        yield "few_points", str(f.n)
    if a.fixed:
        return
    if a.high - a.low > WIDE_A:
        yield "wide_a", f"{a.high - a.low:.3f}: {a.low:.3f} to {a.high:.3f}"
    if f.R0 is None:
        return
    if a.value < f.options.a_max - 1e-3 and a.value - point.r0 <= 2 * f.sigma:
        yield "no_gain", f"{a.value:.3f} and {point.r0:.3f}"
    if not f.R0.fixed and used[0] > 0:
        ends = [max(min(r, a.value - f.sigma), 0.0) for r in (f.R0.low, f.R0.high)]
        low, high = (solve(replace(f.problem, r0=r)).a for r in ends)
        if abs(low - high) > R0_SHIFT:
            text = f"first at {first} {unit}; A is {low:.3f} with R0 {ends[0]:.3f}"
            yield "r0_unknown", f"{text}, {high:.3f} with R0 {ends[1]:.3f}"


def _bounds(f: Fit) -> Iterator[tuple[str, str]]:
    """Yield code and range of the parameters at a bound of their range."""
    shape, point = f.problem.shape, f.point
    (u0, u1), (v0, v1) = shape.bounds()
    low, high = -np.inf, f.options.a_max
    if f.options.method == "paper":
        grid_a, grid_cmid = paper_grid(f.problem, f.options)
        low, high = float(grid_a[0]), min(high, float(grid_a[-1]))
        u0, u1 = (shape.u(float(c)) for c in (grid_cmid[0], grid_cmid[-1]))
    if not f.A.fixed and min(high - point.a, point.a - low) < 1e-3:
        yield "a_at_bound", f"{max(low, 0):g} to {high:g}"
    if min(point.v - v0, v1 - point.v) < 1e-3:
        yield "b_at_bound", f"{float(shape.b(v0)):.3g} to {float(shape.b(v1)):.3g}"
    if f.Cmid is not None and min(point.u - u0, u1 - point.u) < 1e-3:
        ends = [amount(float(shape.cmid(u))) for u in (u0, u1)]
        yield "cmid_at_bound", f"{ends[0]} to {ends[1]} {f.unit}"


def _points(f: Fit) -> Iterator[tuple[str, str]]:
    """Yield code and numbers of remarks on the points and their noise."""
    y, skipped = f.series.reward, f.window.skipped
    if len(y) > 1 and y[0] > (top := float(y[1:4].max())) + f.sigma:
        yield "falls_at_start", f"{y[0]:.3f}, then at most {top:.3f}"
    if f.correlated > 0.95:
        yield "correlated", f"probability {f.correlated:.2f}"
    if skipped.any():
        last = amount(float(f.series.compute[skipped][-1]))
        given = f.options.skip is not None or f.options.skip_epochs is not None
        why = "" if given or f.window.skip == 0 else ", which contradict the rest"
        yield "skipped", f"{int(skipped.sum())}, up to {last} {f.unit}{why}"
