"""The result of a fit: the curve with intervals, bands, warnings and prediction."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from .curve import Array
from .intervals import ModelAverage
from .options import FitOptions
from .series import Series
from .solve import FitProblem, Point
from .window import Window


def amount(x: float) -> str:
    """Return a compute with four digits: 2,403 or 33,000 or 1.2e+13."""
    if 1000 <= abs(x) < 1e7:
        digits = max(0, int(np.log10(abs(x))) - 3)
        return f"{round(x, -digits):,.0f}"
    return f"{x:.4g}"


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the ends of its interval; `fixed` values were not estimated."""

    value: float
    low: float
    high: float
    fixed: bool = False

    @classmethod
    def around(cls, value: float, low: float, high: float, fixed: bool = False) -> Self:
        """Return the interval extended to the estimate, which may lie outside."""
        return cls(value, min(low, value), max(high, value), fixed)

    @classmethod
    def of_draws(cls, value: float, draws: Array, level: float, method: Any = "linear") -> Self:
        """Return the central interval of some draws, extended to the estimate."""
        tail = (1 - level) / 2
        low, high = np.quantile(draws, [tail, 1 - tail], method=method)
        return cls.around(value, float(low), float(high))

    def map(self, function: Callable[[float], Array]) -> "Interval":
        """Return the interval of an increasing function of the value."""
        value, low, high = (float(function(x)) for x in (self.value, self.low, self.high))
        return Interval(value, low, high)

    def parts(self, spec: str = ".4g") -> tuple[str, str]:
        """Return value and interval as texts; `spec` is a format, or "amount" for compute."""
        write = amount if spec == "amount" else lambda x: f"{x:{spec}}"
        numbers = (self.value, self.low, self.high)
        value, low, high = (write(x) if np.isfinite(x) else "never" for x in numbers)
        point = self.fixed and self.low == self.high
        return value, "fixed" if point else f"[{low}, {high}]"

    def __format__(self, spec: str) -> str:
        return " ".join(self.parts(spec or ".4g"))

    def __str__(self) -> str:
        return format(self)


@dataclass(frozen=True, slots=True)
class FitWarning:
    """A remark about a fit: a code for programs, a text for readers."""

    code: str
    text: str
    serious: bool = True


@dataclass(frozen=True, slots=True)
class Prediction:
    """Errors of the fit on the points beyond `fit_until`."""

    points: int
    rmse: float  # root mean square error of `Fit.predict`
    rmse_curve: float  # root mean square error of `Fit.curve`
    bias: float  # mean of prediction minus measurement
    coverage: float  # share of the points inside the band
    first: float
    last: float  # compute of the first and the last held-out point


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted curve; compute is in `unit`, rewards are fractions of 1.

    A, B, Cmid, R0 (and D for the power law) are those of the least-squares curve, with
    profile-likelihood intervals at `options.level`. If the fit is ill-conditioned, A is the median
    of the plausible curves and the others are of the least-squares curve with that A: half of the
    error (`benchmarks/results/scaling_defaults.md`). Cmid and R0 are None for the power law, D for
    the sigmoids.
    """

    A: Interval
    B: Interval
    Cmid: Interval | None
    R0: Interval | None
    D: Interval | None
    sse: float  # sum of squared errors of the used points (weights of mean 1 if stderr is given)
    sigma: float  # noise of one evaluation (standard deviation), from the residuals
    correlated: float  # probability that neighboring evaluations have correlated noise
    series: Series = field(repr=False)
    window: Window = field(repr=False)
    options: FitOptions
    problem: FitProblem = field(repr=False)
    point: Point = field(repr=False)  # the curve of A, B, Cmid and R0
    least_squares: Point = field(repr=False)
    models: ModelAverage = field(repr=False)
    warnings: tuple[FitWarning, ...] = ()
    prediction: Prediction | None = None

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.series.name

    @property
    def unit(self) -> str:
        """Unit of compute."""
        return self.series.unit

    @property
    def n(self) -> int:
        """Number of points that were fitted."""
        return int(self.window.used.sum())

    @property
    def well_conditioned(self) -> bool:
        """True if no warning is serious: the data determine the curve."""
        return not any(w.serious for w in self.warnings)

    @property
    def estimate(self) -> str:
        """Name of the estimate that A is."""
        return "least squares" if self.point is self.least_squares else "median"

    def curve(self, compute: ArrayLike) -> Array:
        """Return the curve of A, B, Cmid and R0 at `compute`."""
        shape, q = self.problem.shape, self.point
        g = shape.g(shape.x(np.asarray(compute, dtype=float)), q.u, q.v)
        return q.r0 + (q.a - q.r0) * g

    def predict(self, compute: ArrayLike) -> Array:
        """Return the expected pass rate: the average of the plausible curves, by probability.

        Equals `curve` within the data; beyond them it is the better forecast if A is uncertain
        (`benchmarks/results/scaling_prediction.md`).
        """
        c = np.atleast_1d(np.asarray(compute, dtype=float))
        return self.models.mean(c).reshape(np.shape(compute))

    def band(
        self, compute: ArrayLike, kind: Literal["evaluation", "curve"] = "evaluation"
    ) -> tuple[Array, Array]:
        """Return both ends of the interval of one evaluation, or of the noiseless curve."""
        c = np.atleast_1d(np.asarray(compute, dtype=float))
        band = self.models.band if kind == "evaluation" else self.models.curve_band
        low, high = band(c, self.options.level)
        return low.reshape(np.shape(compute)), high.reshape(np.shape(compute))

    def __str__(self) -> str:
        cmid = "" if self.Cmid is None else f", Cmid {self.Cmid:.4g} {self.unit}"
        verdict = "well-conditioned" if self.well_conditioned else "ILL-CONDITIONED"
        return f"{self.name or 'fit'}: A {self.A:.3f}, B {self.B:.2f}{cmid}, {verdict}"
