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
    log_evidence: float
    """Log marginal likelihood up to a constant of the data; compares noise models."""

    @property
    def sigma(self) -> float:
        """Noise of one evaluation (standard deviation, in pass rate)."""
        return float(np.sqrt(variance(self.center.s, self.problem.dof)))

    def threshold(self, level: float) -> float:
        """Return the sum of squares at the edge of the region."""
        return threshold(self.center.s, self.problem.dof, level)

    def half_width(self, variances: Array, level: float) -> Array:
        """Return a linear quantity's half-width at the edge in each cell; nan outside."""
        slack = self.threshold(level) - self.cells.s
        return np.where(slack >= 0, np.sqrt(np.maximum(slack, 0) * variances), np.nan)

    def a_range(self, level: float) -> tuple[Array, Array]:
        """Return the least and greatest A of each cell in the region [cells]; nan outside."""
        half = self.half_width(self.cells.v_aa, level)
        low = np.maximum(self.cells.a - half, self.problem.a_floor)
        high = np.minimum(self.cells.a + half, self.problem.a_max)
        out = low > high
        return np.where(out, np.nan, low), np.where(out, np.nan, high)

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
        p, c, g = self.problem, self.cells, self._g(compute, keep)
        low, high = np.tile(self.mean_curve(compute), (2, len(levels), 1))
        e = 1 - g
        variances = c.v_aa[keep, None] * g**2 + 2 * c.v_ar[keep, None] * g * e
        variances = variances + c.v_rr[keep, None] * e**2
        spread = np.sqrt(np.maximum(variances, 0))
        center = c.a[keep, None] * g + c.r0[keep, None] * e
        least = -np.inf if p.r0 is None else p.r0
        most = np.full_like(g, p.a_max) if p.r0 is None else p.r0 + (p.a_max - p.r0) * g
        for i, level in enumerate(levels):
            inside = np.isfinite(self.a_range(float(level))[0][keep])
            if inside.any():
                slack = self.threshold(float(level)) - c.s[keep[inside]]
                half = np.sqrt(slack)[:, None] * spread[inside]
                low[i] = np.maximum(center[inside] - half, least).min(axis=0)
                high[i] = np.minimum(center[inside] + half, most[inside]).max(axis=0)
        # Pairs with R0 > A fall with compute and are no curves: monotone envelopes drop them.
        order = np.argsort(compute, kind="stable")
        back = np.argsort(order, kind="stable")
        low = np.maximum.accumulate(low[:, order], axis=1)[:, back]
        rising = np.minimum.accumulate(high[:, order][:, ::-1], axis=1)[:, ::-1]
        return low, np.maximum(rising[:, back], low)

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
        p, c, nu = self.problem, self.cells, max(degrees_in_cell(self.problem), 1)
        scale = np.sqrt(np.maximum(variance(c.s[k], nu), 1e-18) * c.v_aa[k])
        if p.fix_a is not None:
            a = np.full(n, p.fix_a)
        else:
            lo, hi = (stdtr(nu, (bound - c.a[k]) / scale) for bound in (p.a_floor, p.a_max))
            a = c.a[k] + scale * stdtrit(nu, lo + (hi - lo) * rng.uniform(1e-9, 1 - 1e-9, n))
            a = np.clip(a, p.a_floor, p.a_max)
        r0 = c.r0[k]
        if p.r0 is None:
            slope = np.divide(c.v_ar[k], c.v_aa[k], out=np.zeros(n), where=c.v_aa[k] > 0)
            rest = np.maximum(c.v_rr[k] - slope * c.v_ar[k], 0)
            noise = np.sqrt(rest * variance(c.s[k], nu)) * rng.standard_t(nu, n)
            r0 = np.clip(r0 + slope * (a - c.a[k]) + noise, p.r0_floor, a)
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
    du = (u[:, -1:] - u[:, :1]) / max(u.shape[1] - 1, 1)
    return np.broadcast_to(du, u.shape), float(v[1, 0] - v[0, 0])


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
