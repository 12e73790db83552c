"""`fit(compute, reward) -> Fit`: one curve with intervals, band, warnings and prediction.

Three lines in a notebook::

    from megatron_rl.scaling import fit
    f = fit(compute, reward, r0=0.40, fit_until=8000)
    print(f.A, f.B, f.Cmid, f.prediction)
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .condition import find_warnings
from .curve import Array
from .errors import PointsError
from .fit_result import Fit, Interval, Prediction
from .intervals import ModelAverage, average_models
from .options import FitOptions
from .paper import solve_paper
from .series import Series
from .solve import FitProblem, Point, solve
from .window import choose_window, make_problem

DRAWS = 4000


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
    warnings = find_warnings(f)
    if options.fix_a is None and any(w.serious for w in warnings):
        f = result(solve(replace(p, fix_a=float(np.median(models.draw(DRAWS).a)))))
    f = replace(f, warnings=warnings)
    if options.run_margin > 0 and not f.A.fixed:
        low = f.A.value - float(np.hypot(f.A.value - f.A.low, options.run_margin))
        high = f.A.value + float(np.hypot(f.A.high - f.A.value, options.run_margin))
        f = replace(f, A=Interval(f.A.value, max(low, 0.0), min(high, options.a_max)))
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
    return Prediction(
        points=len(c),
        rmse=float(np.sqrt(np.mean(error**2))),
        rmse_curve=float(np.sqrt(np.mean((f.curve(c) - y) ** 2))),
        bias=float(np.mean(error)),
        coverage=float(np.mean((y >= low) & (y <= high))),
        first=float(c[0]),
        last=float(c[-1]),
    )
