"""`fit(compute, reward) -> Fit`: one curve with intervals, band, warnings and prediction.

A fit with a serious warning is ill-conditioned.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .curve import Array
from .errors import PointsError
from .fit_result import Fit, FitWarning, Interval, Prediction, amount
from .intervals import ModelAverage, average_models
from .options import FitOptions
from .series import Series
from .solve import FitProblem, Point, paper_grid, solve, solve_paper
from .window import choose_window, make_problem

DRAWS = 4000
WIDE_A = 0.05  # largest width of the interval of A without a warning (run-to-run margin: 0.02)
R0_SHIFT = 0.02  # largest change of A over the interval of an R0 that no evaluation shows
FEW_POINTS, FEW_BEYOND = 7, 3
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
REMARKS = {
    "falls_at_start": "the first evaluation is above the next ones: check it, or give --skip",
    "correlated": "neighboring residuals are correlated; the intervals allow for it",
    "skipped": "early points were left out",
}
MEANINGS = SERIOUS | REMARKS


def fit(
    compute: ArrayLike | Series,
    reward: ArrayLike | None = None,
    stderr: ArrayLike | None = None,
    *,
    name: str = "",
    unit: str = "compute",
    **options: Any,
) -> Fit:
    """Fit a compute-performance curve (Equation 1 of arXiv 2510.13786 by default).

    Args:
        compute: compute of the evaluations [n] in any unit, or a Series.
        reward: pass rates [n] in [0, 1].
        stderr: standard errors [n]; they weigh the points, the residuals give the noise level.
        name: name of the run.
        unit: unit of compute, for the output.
        options: the fields of `FitOptions`: r0, skip, fit_until, form, method, fix_a, a_max, level,
            run_margin, correlated and others.

    Raises:
        PointsError: bad input or options; the message names the value and the remedy.
    """
    if not isinstance(compute, Series):
        if reward is None:
            raise PointsError("no rewards were given", "Call fit(compute, reward)")
        compute = Series.clean(compute, reward, stderr, name=name, unit=unit)
    return fit_series(compute, FitOptions(**options))


def fit_series(series: Series, options: FitOptions) -> Fit:
    """Fit a series; see `fit`."""
    window = choose_window(series, options)
    points = series.take(window.used)
    p = make_problem(points, options, window.r0)
    least = solve(p) if options.method == "fast" else solve_paper(p, options)
    models = average_models(p, points, least, options.correlated)

    def result(point: Point) -> Fit:
        a, b, cmid, r0, d = _parameters(p, point, models, options)
        numbers = a, b, cmid, r0, d, least.s, models.sigma, models.correlated
        return Fit(*numbers, series, window, options, p, point, least, models)

    f = result(least)
    warnings = _find_warnings(f)
    if options.fix_a is None and any(w.serious for w in warnings):
        f = result(solve(replace(p, fix_a=float(np.median(models.draw(DRAWS).a)))))
    f = replace(f, warnings=warnings)
    if options.run_margin > 0 and not f.A.fixed:
        a, margin = f.A.value, options.run_margin
        low, high = a - np.hypot(a - f.A.low, margin), a + np.hypot(f.A.high - a, margin)
        f = replace(f, A=Interval(a, float(max(low, 0.0)), float(min(high, options.a_max))))
    return replace(f, prediction=_predict(f)) if window.held_out.any() else f


def _parameters(
    p: FitProblem, point: Point, models: ModelAverage, options: FitOptions
) -> tuple[Interval, Interval, Interval | None, Interval | None, Interval | None]:
    """Return A, B, Cmid, R0 and D of a curve, with the intervals of the models."""
    ends, shape = models.intervals(options.level), p.shape
    a = Interval.around(point.a, *ends["a"], fixed=options.fix_a is not None)
    b = Interval.around(point.v, *ends["v"]).map(shape.b)
    if shape.has_u:
        cmid = Interval.around(point.u, *ends["u"]).map(shape.cmid)
        return a, b, cmid, Interval.around(point.r0, *ends["r0"], fixed=p.r0 is not None), None
    # D is no coordinate of the likelihood map: its interval comes from draws.
    curves = models.draw(DRAWS)
    draws = (curves.a - curves.r0) * shape.anchor ** np.exp(curves.v)
    value = (point.a - point.r0) * shape.anchor ** float(np.exp(point.v))
    return a, b, None, None, Interval.of_draws(value, draws, options.level)


def _predict(f: Fit) -> Prediction:
    held_out, used = f.series.take(f.window.held_out), f.series.take(f.window.used)
    c, y = held_out.compute, held_out.reward
    noise: Array | float = 1.0
    if held_out.stderr is not None and used.stderr is not None:
        noise = held_out.stderr / np.sqrt(np.mean(used.stderr**2))
    low, high = f.models.band(c, f.options.level, noise)
    error = f.predict(c) - y
    rmse, rmse_curve = (float(np.sqrt(np.mean(e**2))) for e in (error, f.curve(c) - y))
    bias, coverage = float(np.mean(error)), float(np.mean((y >= low) & (y <= high)))
    return Prediction(len(c), rmse, rmse_curve, bias, coverage, float(c[0]), float(c[-1]))


def _find_warnings(f: Fit) -> tuple[FitWarning, ...]:
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
        chosen = f.options.skip is None and f.options.skip_epochs is None and f.window.skip > 0
        why = ", which contradict the rest" if chosen else ""
        yield "skipped", f"{int(skipped.sum())}, up to {last} {f.unit}{why}"
