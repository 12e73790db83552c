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
from scipy.special import ndtri

from .condition import find_warnings
from .curve import Array
from .errors import PointsError
from .fit_result import Fit, Interval, Prediction
from .intervals import average_models
from .options import FitOptions
from .paper import solve_paper
from .series import Series
from .solve import solve
from .window import Window, choose_window, make_problem


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
            run_margin, correlated.

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
    point = solve(p) if options.method == "fast" else solve_paper(p)
    models = average_models(p, points, point, options.correlated)
    ends = models.intervals(options.level)
    shape = p.shape
    A = Interval.around(point.a, *ends["a"], fixed=options.fix_a is not None)
    B = Interval.around(point.v, *ends["v"]).map(shape.b)
    Cmid = R0 = D = None
    if shape.has_u:
        Cmid = Interval.around(point.u, *ends["u"]).map(shape.cmid)
        R0 = _fixed_r0(window, options.level) or Interval.around(point.r0, *ends["r0"])
    else:
        # D is no coordinate of the likelihood map: its interval comes from draws.
        curves = models.draw(4000)
        draws = (curves.a - curves.r0) * shape.anchor ** np.exp(curves.v)
        value = (point.a - point.r0) * shape.anchor ** float(np.exp(point.v))
        D = Interval.of_draws(value, draws, options.level)
    noise = models.sigma, models.correlated
    f = Fit(A, B, Cmid, R0, D, point.s, *noise, series, window, options, p, point, models)
    f = replace(f, warnings=find_warnings(f))
    if options.run_margin > 0 and not A.fixed:
        low = A.value - float(np.hypot(A.value - A.low, options.run_margin))
        high = A.value + float(np.hypot(A.high - A.value, options.run_margin))
        f = replace(f, A=Interval(A.value, max(low, 0.0), min(high, options.a_max)))
    return replace(f, prediction=_predict(f)) if window.held_out.any() else f


def _fixed_r0(window: Window, level: float) -> Interval | None:
    """Return the interval of an R0 that was not fitted, from its standard error."""
    if window.r0 is None:
        return None
    half = 0.0 if window.r0_stderr is None else window.r0_stderr * float(ndtri((1 + level) / 2))
    return Interval(window.r0, max(window.r0 - half, 0.0), min(window.r0 + half, 1.0), True)


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
