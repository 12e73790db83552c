"""`fit(compute, reward) -> Fit`: one curve with intervals, band, warnings and prediction.

Three lines in a notebook::

    from megatron_rl.scaling import fit
    f = fit(compute, reward, r0=0.40, fit_until=8000)
    print(f.A, f.B, f.Cmid, f.prediction)
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from .condition import Finding, judge
from .curve import FORMS, Array, FormName
from .errors import DataError
from .intervals import PRIOR, Belief, believe
from .paper import solve_paper
from .series import Series
from .solve import Point, Problem, solve
from .window import R0Choice, Window, choose, problem

Method = Literal["fast", "paper"]
RUN_MARGIN = 0.02
"""Differences of A below this are no differences (the paper's three repeats moved A by 0.015)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the ends of its interval; `fixed` values were not estimated."""

    value: float
    low: float
    high: float
    fixed: bool = False

    def __float__(self) -> float:
        return self.value

    def __format__(self, spec: str) -> str:
        spec = spec or ".4g"
        if self.fixed:
            return f"{self.value:{spec}} (fixed)"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def __str__(self) -> str:
        return format(self)


@dataclass(frozen=True, slots=True)
class Prediction:
    """How the fit does on the points beyond `fit_until`."""

    points: int
    rmse: float
    """Root mean square error of `Fit.predict` there."""
    rmse_curve: float
    """The same for the least-squares curve alone."""
    bias: float
    """Mean of prediction minus measurement."""
    coverage: float
    """Share of the points inside the band."""
    first: float
    last: float
    """Compute of the first and the last held-out point."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted curve; compute is in `unit`, rewards are fractions of 1.

    A, B, Cmid, R0 (and D for the power law) are least-squares estimates with profile-likelihood
    intervals at `level`. Cmid and R0 are None for the power law, D is None for the sigmoids.
    """

    name: str
    form: FormName
    method: Method
    unit: str
    level: float
    A: Interval
    B: Interval
    Cmid: Interval | None
    R0: Interval | None
    D: Interval | None
    sse: float
    """Sum of squared errors of the used points (weighted with mean weight 1 if stderr is given)."""
    sigma: float
    """Noise of one evaluation (standard deviation), from the residuals."""
    warnings: tuple[Finding, ...]
    prediction: Prediction | None
    window: Window = field(repr=False)
    series: Series = field(repr=False)
    fit_until: float | None
    run_margin: float
    a_max: float
    _point: Point = field(repr=False)
    _problem: Problem = field(repr=False)
    _belief: Belief = field(repr=False)

    @property
    def well_conditioned(self) -> bool:
        """No serious finding: the data determine the curve."""
        return not any(w.serious for w in self.warnings)

    @property
    def n(self) -> int:
        """Number of points that were fitted."""
        return int(self.window.used.sum())

    @property
    def repairs(self) -> tuple[str, ...]:
        """What was changed in the input."""
        return self.series.repairs

    @property
    def correlated(self) -> float:
        """Probability that neighbouring evaluations have correlated noise."""
        return self._belief.correlated

    def curve(self, compute: ArrayLike) -> Array:
        """The least-squares curve at `compute`."""
        shape, q = self._problem.shape, self._point
        g = shape.g(shape.x(np.asarray(compute, dtype=float)), q.u, q.v)
        return q.r0 + (q.a - q.r0) * g

    def predict(self, compute: ArrayLike) -> Array:
        """Expected pass rate: the average of the curves that the data allow, by probability.

        Equals `curve` where the data are; beyond them it is the better forecast when A is uncertain
        (`benchmarks/results/scaling_prediction.md`).
        """
        c = np.atleast_1d(np.asarray(compute, dtype=float))
        return self._belief.mean(c).reshape(np.shape(compute))

    def band(
        self,
        compute: ArrayLike,
        level: float | None = None,
        kind: Literal["evaluation", "curve"] = "evaluation",
    ) -> tuple[Array, Array]:
        """Lower and upper end of the interval of one evaluation, or of the noiseless curve."""
        c = np.atleast_1d(np.asarray(compute, dtype=float))
        make = self._belief.band if kind == "evaluation" else self._belief.curve_band
        low, high = make(c, self.level if level is None else level)
        return low.reshape(np.shape(compute)), high.reshape(np.shape(compute))

    def bootstrap(
        self, n: int = 1000, block: int | None = None, seed: int = 0
    ) -> dict[str, "Interval"]:
        """Moving-block bootstrap intervals of A, B and Cmid, as a check; see `bootstrap`."""
        from .bootstrap import bootstrap

        return bootstrap(self, n, block, seed)

    def draws(self, n: int = 4000, seed: int = 0) -> tuple[Array, Array, Array, Array]:
        """Plausible curves (A, R0, u, v), for probabilities; see curve.Shape for u and v."""
        return self._belief.draw(n, seed)

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON object (docs/scaling.md), schema `megatron_rl.fit/1`."""
        from .report import fit_to_dict

        return fit_to_dict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as text; not-a-number never occurs, open ends are null."""
        import json

        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def save_plot(self, path: str) -> None:
        """Write PNG, SVG or PDF by the ending of `path`."""
        from .plot import save_plot

        save_plot(self, path)

    def __str__(self) -> str:
        parts = [f"{self.name or 'fit'}: A {self.A:.3f}, B {self.B:.2f}"]
        if self.Cmid is not None:
            parts.append(f"Cmid {self.Cmid:.4g} {self.unit}")
        parts.append("well-conditioned" if self.well_conditioned else "ILL-CONDITIONED")
        return ", ".join(parts)


def fit(
    compute: ArrayLike | Series,
    reward: ArrayLike | None = None,
    stderr: ArrayLike | None = None,
    *,
    r0: R0Choice = "first",
    skip: float | None = None,
    fit_until: float | None = None,
    form: FormName = "log-sigmoid",
    method: Method = "fast",
    fix_a: float | None = None,
    a_max: float = 1.0,
    level: float = 0.95,
    run_margin: float = 0.0,
    correlated: float = PRIOR,
    name: str = "",
    unit: str = "compute",
) -> Fit:
    """Fit a compute-performance curve (Equation 1 of arXiv 2510.13786 by default).

    Args:
        compute: compute of the evaluations [n] in any unit, or a Series.
        reward: pass rates [n] in [0, 1].
        stderr: standard errors [n]; they weigh the points, the residuals give the noise level.
        r0: reward at zero compute: a number, "first" (evaluation) or "fit".
        skip: leave out points up to this compute; None: see `window`; 0: none.
        fit_until: points beyond are held out and predicted.
        form: "log-sigmoid", "linear-sigmoid" or "power-law".
        method: "fast", or "paper" for the paper's grid.
        fix_a: hold A at this value.
        a_max: upper bound of A.
        level: confidence level of intervals and band, 0.5 to 0.999.
        run_margin: run-to-run spread of A, added in quadrature to both sides of its interval.
        correlated: prior probability of correlated noise (0: independent evaluations).
        name: name of the run.
        unit: unit of compute, for the output.

    Raises:
        DataError: bad input; the message says where and what to do.
    """
    if isinstance(compute, Series):
        series = compute
    else:
        if reward is None:
            raise DataError("no rewards were given", "Call fit(compute, reward)")
        series = Series.clean(compute, reward, stderr, name=name, unit=unit)
    _check_options(form, method, fix_a, a_max, level, correlated)
    window = choose(series, form, r0, skip, fit_until, fix_a, a_max)
    index = np.flatnonzero(window.used)
    p = problem(series, form, window.r0, index, fix_a, a_max)
    point = solve(p) if method == "fast" else solve_paper(p)
    s = None if series.stderr is None else series.stderr[index]
    belief = believe(p, series.compute[index], s, point, correlated)
    return _assemble(series, window, p, point, belief, form, method, fit_until, level, run_margin)


def _check_options(
    form: str, method: str, fix_a: float | None, a_max: float, level: float, correlated: float
) -> None:
    if form not in FORMS:
        raise DataError(f"unknown form {form!r}", f"Choose one of {', '.join(FORMS)}")
    if method not in ("fast", "paper"):
        raise DataError(f"unknown method {method!r}", "Choose 'fast' or 'paper'")
    if not 0 < a_max <= 1 or (fix_a is not None and not 0 < fix_a <= a_max):
        raise DataError(f"A is bounded by {a_max:g}, fixed at {fix_a}", "Give 0 < A <= a_max <= 1")
    if not 0.5 <= level <= 0.999:
        raise DataError(f"level is {level:g}", "Give a level from 0.5 to 0.999")
    if not 0 <= correlated <= 1:
        raise DataError(f"correlated is {correlated:g}", "Give a probability")


def _assemble(
    series: Series,
    window: Window,
    p: Problem,
    point: Point,
    belief: Belief,
    form: FormName,
    method: Method,
    fit_until: float | None,
    level: float,
    run_margin: float,
) -> Fit:
    shape = p.shape
    ends = belief.intervals(level)
    a = _around(point.a, ends["a"], p.fix_a is not None)
    v = _around(point.v, ends["v"])
    B = Interval(float(shape.b(point.v)), float(shape.b(v.low)), float(shape.b(v.high)))
    Cmid = R0 = D = None
    if shape.has_u:
        u = _around(point.u, ends["u"])
        mid, low, high = (float(shape.cmid(t)) for t in (point.u, u.low, u.high))
        Cmid = Interval(mid, low, high)
        R0 = _r0_interval(window, point, ends["r0"], level)
    else:
        D = _d_interval(p, point, belief, level)
    (u0, u1), (v0, v1) = shape.bounds()
    used = series.compute[window.used]
    findings = judge(
        a=point.a,
        a_low=a.low,
        a_high=a.high,
        b_bounds_hit=min(point.v - v0, v1 - point.v) < 1e-3,
        cmid_bounds_hit=shape.has_u and min(point.u - u0, u1 - point.u) < 1e-3,
        cmid=None if Cmid is None else Cmid.value,
        r0=point.r0,
        r0_at=window.r0_at,
        a_fixed=a.fixed,
        a_max=p.a_max,
        last=float(used[-1]),
        used=len(used),
        beyond=0 if Cmid is None else int((used > Cmid.value).sum()),
        sigma=belief.sigma,
        correlated=belief.correlated,
        skipped=int(window.skipped.sum()),
        skip=window.skip,
        unit=series.unit,
    )
    if run_margin > 0 and not a.fixed:
        low = point.a - float(np.hypot(point.a - a.low, run_margin))
        high = point.a + float(np.hypot(a.high - point.a, run_margin))
        a = Interval(point.a, max(low, 0.0), min(high, p.a_max))
    made = Fit(
        name=series.name,
        form=form,
        method=method,
        unit=series.unit,
        level=level,
        A=a,
        B=B,
        Cmid=Cmid,
        R0=R0,
        D=D,
        sse=point.s,
        sigma=belief.sigma,
        warnings=findings,
        prediction=None,
        window=window,
        series=series,
        fit_until=fit_until,
        run_margin=run_margin,
        a_max=p.a_max,
        _point=point,
        _problem=p,
        _belief=belief,
    )
    return replace(made, prediction=_predict(made)) if window.held_out.any() else made


def _around(value: float, ends: tuple[float, float], fixed: bool = False) -> Interval:
    """Interval that contains the estimate: the two come from differently weighted residuals."""
    return Interval(value, min(ends[0], value), max(ends[1], value), fixed)


def _r0_interval(window: Window, point: Point, ends: tuple[float, float], level: float) -> Interval:
    if window.r0 is None:
        return _around(point.r0, ends)
    half = 0.0 if window.r0_stderr is None else window.r0_stderr * float(ndtri((1 + level) / 2))
    return Interval(window.r0, max(window.r0 - half, 0.0), min(window.r0 + half, 1.0), True)


def _d_interval(p: Problem, point: Point, belief: Belief, level: float) -> Interval:
    """D of the power law, in reward times compute^B, by draws: it is no coordinate of the map."""
    a, r0, _, v = belief.draw(4000, 0)
    anchor = p.shape.anchor
    tail = (1 - level) / 2
    low, high = np.quantile((a - r0) * anchor ** np.exp(v), [tail, 1 - tail])
    value = (point.a - point.r0) * anchor ** float(np.exp(point.v))
    return _around(value, (float(low), float(high)))


def _predict(f: Fit) -> Prediction:
    c, y = f.series.compute[f.window.held_out], f.series.reward[f.window.held_out]
    noise: Array | float = 1.0
    if f.series.stderr is not None:
        used = f.series.stderr[f.window.used]
        noise = f.series.stderr[f.window.held_out] / np.sqrt(np.mean(used**2))
    low, high = f._belief.band(c, f.level, noise)
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
