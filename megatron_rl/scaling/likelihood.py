"""The likelihood of all curves on one grid: intervals, bands and probabilities are read off it.

The likelihood of correlated Gaussian noise of unknown size is exact in (A, R0) in each cell of a
grid of shapes (u, v), which `likelihood_grid.build_map` fits to the plausible region.

* Profile-likelihood region: shapes and rewards with ``S <= S_min (1 + F(level; 1, n-p) / (n-p))``.
  Intervals of A, B, Cmid and the band are its extremes, so the band at infinite compute is the
  interval of A, and each bound is monotone in compute because each curve is.
* Weights: the posterior under Jeffreys' prior, which keeps probabilities in step with the intervals
  (a flat prior would favor the long ridge towards high A). Means and draws come from them.
* Evidence: the marginal likelihood, flat in A on [R0, a_max], ln Cmid, ln B and ln sigma; it only
  compares noise models.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit
from scipy.stats import f as f_distribution

from .curve import Array, Index, Shape
from .noise import FLOOR
from .solve import CellSolutions, FitProblem, Point


class Curves(NamedTuple):
    """Curves drawn by probability [n]; see curve.Shape for u and v."""

    a: Array
    r0: Array
    u: Array
    v: Array

    def at(self, compute: Array, shape: Shape) -> Array:
        """Return the curves at some computes [n, m]."""
        a, r0, u, v = (values[:, None] for values in self)
        return r0 + (a - r0) * shape.g(shape.x(compute), u, v)


@dataclass(frozen=True, slots=True)
class LikelihoodMap:
    """Grid of shapes [rows, columns] with the exact linear solution of each cell."""

    problem: FitProblem
    center: Point
    """Minimum of the sum of squares."""
    u: Array
    v: Array
    cells: CellSolutions
    weight: Array
    """Probability of each cell [rows * columns]."""
    mean_a: Array
    mean_r0: Array
    dof: int
    log_evidence: float
    """Log marginal likelihood up to a constant of the data; compares noise models."""

    @property
    def sigma(self) -> float:
        """Noise of one evaluation (standard deviation, in pass rate)."""
        return float(np.sqrt(variance(self.center.s, self.dof)))

    def threshold(self, level: float) -> float:
        """Return the sum of squares at the edge of the region."""
        return threshold(self.center.s, self.dof, level)

    def half_width(self, variances: Array, level: float) -> Array:
        """Return a linear quantity's half-width at the edge in each cell; nan outside."""
        slack = self.threshold(level) - self.cells.s
        return np.where(slack >= 0, np.sqrt(np.maximum(slack, 0) * variances), np.nan)

    def a_range(self, level: float) -> tuple[Array, Array]:
        """Return the least and greatest A of each cell in the region [cells]; nan outside."""
        half = self.half_width(self.cells.v_aa, level)
        low = np.maximum(self.cells.a - half, self.floor)
        high = np.minimum(self.cells.a + half, self.problem.a_max)
        out = low > high
        return np.where(out, np.nan, low), np.where(out, np.nan, high)

    @property
    def floor(self) -> Array:
        """Lower bound of A in each cell: a fixed R0, or 0."""
        return self.cells.r0 if self.problem.r0 is not None else np.zeros_like(self.cells.a)

    def intervals(self, level: float) -> Array:
        """Return the profile-likelihood intervals of A, R0, u and v [4, 2].

        R0 stands for the value at the anchor in the power law.
        """
        center, edge = self.center, self.threshold(level)
        a, r0 = (center.a, center.a), (center.r0, center.r0)
        low, high = self.a_range(level)
        if not np.all(np.isnan(low)):
            a = min(float(np.nanmin(low)), center.a), max(float(np.nanmax(high)), center.a)
        half = self.half_width(self.cells.v_rr, level)
        if not np.all(np.isnan(half)):
            low = np.maximum(self.cells.r0 - half, self.problem.r0_floor)
            r0 = float(np.nanmin(low)), float(np.nanmax(self.cells.r0 + half))
        s = self.cells.s_bounded.reshape(self.u.shape)
        u = _crossing(self.u, s, edge, center.u)
        v = _crossing(self.v[None, :, 0], s.min(axis=1)[None], edge, center.v)
        return np.array([a, r0, u, v])

    def curve_range(self, compute: Array, levels: Array) -> tuple[Array, Array]:
        """Return the least and greatest curve value of each level's region [levels, m]."""
        keep = np.flatnonzero(self.cells.s_bounded <= self.threshold(float(levels.max())))
        if len(keep) == 0:
            keep = np.array([int(np.argmin(self.cells.s_bounded))])
        g = self._g(compute, keep)
        low = np.empty((len(levels), len(compute)))
        high = np.empty_like(low)
        mean = self.mean_curve(compute)
        c, e = self.cells, 1 - g
        variances = c.v_aa[keep, None] * g**2 + 2 * c.v_ar[keep, None] * g * e
        variances = variances + c.v_rr[keep, None] * e**2
        spread = np.sqrt(np.maximum(variances, 0))
        center = c.a[keep, None] * g + c.r0[keep, None] * e
        for i, level in enumerate(levels):
            low_a, high_a = (t[keep, None] for t in self.a_range(float(level)))
            inside = np.isfinite(low_a[:, 0])
            if not inside.any():
                low[i] = high[i] = mean
                continue
            if self.problem.r0 is not None:
                r0 = self.problem.r0
                low[i] = (r0 + (low_a[inside] - r0) * g[inside]).min(axis=0)
                high[i] = (r0 + (high_a[inside] - r0) * g[inside]).max(axis=0)
            else:
                slack = self.threshold(float(level)) - c.s[keep[inside]]
                half = np.sqrt(np.maximum(slack, 0))[:, None] * spread[inside]
                low[i] = (center[inside] - half).min(axis=0)
                high[i] = np.minimum(center[inside] + half, self.problem.a_max).max(axis=0)
        if self.problem.r0 is None:
            # Pairs with R0 > A fall with compute and are no curves: monotone envelopes drop them.
            order = np.argsort(compute, kind="stable")
            back = np.argsort(order, kind="stable")
            low = np.maximum.accumulate(low[:, order], axis=1)[:, back]
            rising = np.minimum.accumulate(high[:, order][:, ::-1], axis=1)[:, ::-1]
            high = np.maximum(rising[:, back], low)
        return low, high

    def mean_curve(self, compute: Array) -> Array:
        """Return the average of the curves by their weight at each compute [m]."""
        keep = np.flatnonzero(self.weight > 1e-7)
        g = self._g(compute, keep)
        a, r0, w = self.mean_a[keep, None], self.mean_r0[keep, None], self.weight[keep, None]
        return np.asarray((w * (r0 + (a - r0) * g)).sum(axis=0) / w.sum())

    def draw(self, n: int, seed: int) -> Curves:
        """Draw n curves by weight."""
        rng = np.random.default_rng(seed)
        k = rng.choice(len(self.weight), size=n, p=self.weight)
        c, nu = self.cells, max(degrees_in_cell(self.problem), 1)
        scale = np.sqrt(np.maximum(variance(c.s[k], nu), 1e-18) * c.v_aa[k])
        if self.problem.fix_a is not None:
            a = np.full(n, self.problem.fix_a)
        else:
            lo = stdtr(nu, (self.floor[k] - c.a[k]) / scale)
            hi = stdtr(nu, (self.problem.a_max - c.a[k]) / scale)
            a = c.a[k] + scale * stdtrit(nu, lo + (hi - lo) * rng.uniform(1e-9, 1 - 1e-9, n))
            a = np.clip(a, self.floor[k], self.problem.a_max)
        r0 = c.r0[k].copy()
        if self.problem.r0 is None:
            slope = np.divide(c.v_ar[k], c.v_aa[k], out=np.zeros(n), where=c.v_aa[k] > 0)
            rest = np.maximum(c.v_rr[k] - slope * c.v_ar[k], 0)
            noise = np.sqrt(rest * variance(c.s[k], nu)) * rng.standard_t(nu, n)
            r0 = np.clip(r0 + slope * (a - c.a[k]) + noise, self.problem.r0_floor, a)
        # Half a cell of jitter: the grid is a quadrature, not a set of atoms.
        du, dv = cell_sizes(self.u, self.v)
        u = self.u.ravel()[k] + du.ravel()[k] * rng.uniform(-0.5, 0.5, n)
        return Curves(a, r0, u, self.v.ravel()[k] + dv * rng.uniform(-0.5, 0.5, n))

    def _g(self, compute: Array, keep: Index) -> Array:
        shape, u, v = self.problem.shape, self.u.ravel()[keep, None], self.v.ravel()[keep, None]
        return shape.g(shape.x(compute)[None], u, v)


def degrees_in_cell(p: FitProblem) -> int:
    """Return the degrees of freedom of A inside one cell."""
    return len(p.y) - (2 if p.r0 is None else 1)


def variance(s: Array | float, dof: int) -> Array:
    """Return the noise variance of a sum of squares, at least FLOOR^2."""
    return np.maximum(np.asarray(s) / dof, FLOOR**2)


def threshold(s_min: float, dof: int, level: float) -> float:
    """Return the edge of the profile-likelihood region for noise of unknown size."""
    return s_min + _quantile(level, dof) * float(variance(s_min, dof))


@cache
def _quantile(level: float, dof: int) -> float:
    return float(f_distribution.ppf(level, 1, dof))


def cell_sizes(u: Array, v: Array) -> tuple[Array, float]:
    """Return du [rows, columns] (one value per row) and dv."""
    columns = u.shape[1]
    du = (u[:, -1] - u[:, 0]) / (columns - 1) if columns > 1 else np.zeros(len(u))
    return np.repeat(du[:, None], columns, axis=1), float(v[1, 0] - v[0, 0])


def _crossing(x: Array, s: Array, edge: float, center: float) -> tuple[float, float]:
    """Return the least and greatest x with s <= edge over rows [r, k], interpolated linearly."""
    inside = s <= edge
    if not inside.any():
        return center, center
    last = x.shape[1] - 1
    rows = np.flatnonzero(inside.any(axis=1))
    first_k = np.argmax(inside[rows], axis=1)
    last_k = last - np.argmax(inside[rows, ::-1], axis=1)

    def ends(k: Index, step: int) -> Array:
        out = np.clip(k + step, 0, last)
        rise = s[rows, out] - s[rows, k]
        share = np.divide(edge - s[rows, k], rise, out=np.zeros(len(rows)), where=rise > 0)
        return x[rows, k] + share * (x[rows, out] - x[rows, k])

    low, high = float(ends(first_k, -1).min()), float(ends(last_k, 1).max())
    return min(low, center), max(high, center)
