"""The likelihood of all curves on one grid: intervals, bands and probabilities are read off it.

The likelihood of correlated Gaussian noise of unknown size is exact in (A, R0) in each cell of a
grid of shapes (u, v), which `build_map` shears along the ridge and zooms until the plausible region
fills it.

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
from scipy.special import gammaln, stdtr, stdtrit
from scipy.stats import f as f_distribution

from .curve import Array, Index, Mask, Shape
from .series import FLOOR
from .solve import CellSolutions, FitProblem, Point, refine, solve_cells

WIDE = 0.9999  # level of the region that the grid covers; the weights beyond it are dropped
CELLS = 51  # cells of the grid in each direction


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
    center: Point  # minimum of the sum of squares
    u: Array
    v: Array
    cells: CellSolutions
    weight: Array  # probability of each cell [rows * columns]
    mean_a: Array
    mean_r0: Array
    log_evidence: float  # log marginal likelihood up to a constant of the data

    @property
    def sigma(self) -> float:
        """Noise of one evaluation (standard deviation, in pass rate)."""
        return float(np.sqrt(_variance(self.center.s, self.problem.dof)))

    def _half_width(self, variances: Array, edge: float) -> Array:
        """Return a linear quantity's half-width at the edge in each cell; nan outside."""
        slack = edge - self.cells.s
        return np.where(slack >= 0, np.sqrt(np.maximum(slack, 0) * variances), np.nan)

    def _a_range(self, edge: float) -> Array:
        """Return the least and greatest A of each cell in the region [2, cells]; nan outside."""
        half = self._half_width(self.cells.v_aa, edge)
        low = np.maximum(self.cells.a - half, self.problem.a_floor)
        high = np.minimum(self.cells.a + half, self.problem.a_max)
        return np.where(low > high, np.nan, [low, high])

    def intervals(self, level: float) -> Array:
        """Return the profile-likelihood intervals of A, R0, u and v [4, 2].

        R0 stands for the value at the anchor in the power law.
        """
        center, edge = self.center, _threshold(self.problem, self.center, level)
        a, r0 = (center.a, center.a), (center.r0, center.r0)
        low, high = self._a_range(edge)
        if not np.all(np.isnan(low)):
            a = min(np.nanmin(low), center.a), max(np.nanmax(high), center.a)
        half = self._half_width(self.cells.v_rr, edge)
        if not np.all(np.isnan(half)):
            low = np.maximum(self.cells.r0 - half, self.problem.r0_floor)
            r0 = np.nanmin(low), np.nanmax(self.cells.r0 + half)
        s = self.cells.s_bounded.reshape(self.u.shape)
        u = _crossing(self.u, s, edge, center.u)
        v = _crossing(self.v[None, :, 0], s.min(axis=1)[None], edge, center.v)
        return np.array([a, r0, u, v])

    def curve_range(self, compute: Array, levels: Array) -> tuple[Array, Array]:
        """Return the least and greatest curve value of each level's region [levels, m]."""
        edges = [_threshold(self.problem, self.center, float(level)) for level in levels]
        keep = np.flatnonzero(self.cells.s_bounded <= max(edges))
        if len(keep) == 0:
            keep = np.array([int(np.argmin(self.cells.s_bounded))])
        p, c, g = self.problem, self.cells, self._g(compute, keep)
        low, high = np.tile(self.mean_curve(compute), (2, len(levels), 1))
        e = 1 - g
        v_aa, v_ar, v_rr = (v[keep, None] for v in (c.v_aa, c.v_ar, c.v_rr))
        spread = np.sqrt(np.maximum(v_aa * g**2 + 2 * v_ar * g * e + v_rr * e**2, 0))
        center = c.a[keep, None] * g + c.r0[keep, None] * e
        least = -np.inf if p.r0 is None else p.r0
        most = np.full_like(g, p.a_max) if p.r0 is None else p.r0 + (p.a_max - p.r0) * g
        for i, edge in enumerate(edges):
            inside = np.isfinite(self._a_range(edge)[0][keep])
            if inside.any():
                half = np.sqrt(edge - c.s[keep[inside]])[:, None] * spread[inside]
                low[i] = np.maximum(center[inside] - half, least).min(axis=0)
                high[i] = np.minimum(center[inside] + half, most[inside]).max(axis=0)
        # Pairs with R0 > A fall with compute and are no curves: monotone envelopes drop them.
        order = np.argsort(compute, kind="stable")
        back = np.argsort(order, kind="stable")
        low = np.maximum.accumulate(low[:, order], axis=1)[:, back]
        rising = np.minimum.accumulate(high[:, order[::-1]], axis=1)[:, ::-1]
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
        p, c, nu = self.problem, self.cells, _degrees_in_cell(self.problem)
        scale = np.sqrt(np.maximum(_variance(c.s[k], nu), 1e-18) * c.v_aa[k])
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
            noise = np.sqrt(rest * _variance(c.s[k], nu)) * rng.standard_t(nu, n)
            r0 = np.clip(r0 + slope * (a - c.a[k]) + noise, p.r0_floor, a)
        # Half a cell of jitter: the grid is a quadrature, not a set of atoms.
        du, dv = _cell_sizes(self.u, self.v)
        u = self.u.ravel()[k] + du.ravel()[k] * rng.uniform(-0.5, 0.5, n)
        return Curves(a, r0, u, self.v.ravel()[k] + dv * rng.uniform(-0.5, 0.5, n))

    def _g(self, compute: Array, keep: Index) -> Array:
        shape, u, v = self.problem.shape, self.u.ravel()[keep, None], self.v.ravel()[keep, None]
        return shape.g(shape.x(compute)[None], u, v)


def _degrees_in_cell(p: FitProblem) -> int:
    return len(p.y) - (2 if p.r0 is None else 1)


def _variance(s: Array | float, dof: int) -> Array:
    return np.maximum(np.asarray(s) / dof, FLOOR**2)


_quantile = cache(f_distribution.ppf)


def _threshold(p: FitProblem, center: Point, level: float) -> float:
    """Return the edge of the profile-likelihood region for noise of unknown size."""
    return center.s + float(_quantile(level, 1, p.dof) * _variance(center.s, p.dof))


def _cell_sizes(u: Array, v: Array) -> tuple[Array, float]:
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


def build_map(p: FitProblem, log_det: float, start: Point) -> LikelihoodMap:
    """Compute the likelihood map of a problem.

    `log_det` is of the noise covariance; the search for the minimum begins at `start`.
    """
    center = refine(p, start)
    (u0, u1), (v0, v1) = p.shape.bounds()
    rows, columns = (CELLS, CELLS) if p.shape.has_u else (4 * CELLS, 1)
    lo_u, hi_u = np.full(rows, u0), np.full(rows, u1)
    v = np.linspace(v0, v1, rows)
    for zoom in range(9):
        u = np.linspace(lo_u, hi_u, columns, axis=1)
        vv = np.repeat(v[:, None], columns, axis=1)
        cells = solve_cells(p, p.shape.g(p.x, u[..., None], vv[..., None]).reshape(-1, len(p.x)))
        s = cells.s_bounded.reshape(u.shape)
        if s.min() < center.s:
            # The zoomed grid has reached a lower valley than `solve`.
            lowest = cells.point(int(np.argmin(s)), u, vv)
            refined = refine(p, lowest)
            center = refined if refined.s < lowest.s else lowest
        inside = s <= _threshold(p, center, WIDE)
        if (inside.mean() > 0.3 and zoom > 0) or zoom == 8:
            break
        v, lo_u, hi_u = _zoom(p, v, u, s, inside, center)
    return _weigh(p, center, u, vv, cells, log_det)


def _zoom(
    p: FitProblem, v: Array, u: Array, s: Array, inside: Mask, center: Point
) -> tuple[Array, Array, Array]:
    """Return new rows and, for each, the range of u that holds the region (one cell spare)."""
    u_box, v_box = p.shape.bounds()
    rows, columns = u.shape
    step_u = (u[:, -1] - u[:, 0]) / max(columns - 1, 1)
    lowest = np.take_along_axis(u, np.argmin(s, axis=1)[:, None], axis=1)[:, 0]
    lo = np.where(inside, u, np.inf).min(axis=1)
    hi = np.where(inside, u, -np.inf).max(axis=1)
    empty = ~inside.any(axis=1)
    lo, hi = np.where(empty, lowest, lo) - step_u, np.where(empty, lowest, hi) + step_u
    step_v, live = v[1] - v[0], v[~empty]
    v_lo, v_hi = live.min(initial=center.v) - step_v, live.max(initial=center.v) + step_v
    new_v = np.linspace(max(v_lo, v_box[0]), min(v_hi, v_box[1]), rows)
    # Each new row spans the range of its two old neighbors, and the center if it is near.
    near = np.clip(np.searchsorted(v, new_v), 1, rows - 1)
    new_lo, new_hi = np.minimum(lo[near - 1], lo[near]), np.maximum(hi[near - 1], hi[near])
    close = np.abs(new_v - center.v) <= step_v
    new_lo = np.where(close, np.minimum(new_lo, center.u), new_lo)
    new_hi = np.where(close, np.maximum(new_hi, center.u), new_hi)
    return new_v, np.clip(new_lo, *u_box), np.clip(new_hi, *u_box)


def _weigh(
    p: FitProblem, center: Point, u: Array, v: Array, cells: CellSolutions, log_det: float
) -> LikelihoodMap:
    """Compute the marginal likelihood of each cell and the mean of (A, R0) in it."""
    n, nu = len(p.y), _degrees_in_cell(p)
    # A noise floor keeps the weights finite on data without noise.
    floor = nu * FLOOR**2 if center.s < nu * FLOOR**2 else 0.0
    s = cells.s + floor + 1e-300
    if p.fix_a is not None:
        log_w = -0.5 * n * np.log(s) + 0.5 * np.log(np.where(cells.v_rr > 0, cells.v_rr, 1.0))
        mean_a, mean_r0 = cells.a_bounded, cells.r0_bounded
    else:
        scale = np.sqrt(s * cells.v_aa / nu)
        z0, z1 = ((bound - cells.a) / scale for bound in (p.a_floor, p.a_max))
        # Upper tail by symmetry, so that a cell far above a_max keeps a finite weight.
        mass = np.where(z0 > 0, stdtr(nu, -z0) - stdtr(nu, -z1), stdtr(nu, z1) - stdtr(nu, z0))
        mass = np.maximum(mass, 1e-300)
        volume = cells.v_aa if p.r0 is not None else cells.v_aa * cells.v_rr - cells.v_ar**2
        log_w = -0.5 * nu * np.log(s) + 0.5 * np.log(np.maximum(volume, 1e-300)) + np.log(mass)
        shift = (_tail_mean(z0, nu) - _tail_mean(z1, nu)) / mass
        mean_a = np.clip(cells.a + scale * shift, p.a_floor, p.a_max)
        slope = np.divide(cells.v_ar, cells.v_aa, out=np.zeros_like(s), where=cells.v_aa > 0)
        mean_r0 = cells.r0 + slope * (mean_a - cells.a)
        mean_r0 = np.clip(mean_r0, p.r0_floor, mean_a) if p.r0 is None else cells.r0
    log_w = np.where(cells.s_bounded <= _threshold(p, center, WIDE), log_w, -np.inf)
    if not np.isfinite(log_w).any():
        log_w[int(np.argmin(cells.s_bounded))] = 0.0
    du, dv = _cell_sizes(u, v)
    area = du.ravel() if p.shape.has_u and du.sum() > 0 else np.ones(u.size)
    top = float(log_w.max())
    evidence = np.log((np.exp(log_w - top) * area).sum() * dv) + top - 0.5 * log_det
    with np.errstate(divide="ignore"):
        log_w = log_w + np.log(area)
    keep = np.flatnonzero(np.isfinite(log_w))
    gain = (mean_a - mean_r0)[keep, None]
    # Jeffreys' prior: the root of the determinant of the Fisher information.
    j = p.jacobian(gain, u.ravel()[keep, None], v.ravel()[keep, None])
    det = np.linalg.det(j.swapaxes(1, 2) @ j)
    log_w = log_w[keep] + 0.5 * np.log(np.maximum(det, 1e-300))
    weight = np.zeros(u.size)
    weight[keep] = np.exp(log_w - log_w.max())
    weight /= weight.sum()
    return LikelihoodMap(p, center, u, v, cells, weight, mean_a, mean_r0, float(evidence))


def _tail_mean(z: Array, nu: int) -> Array:
    """Return the integral of t f(t) from z to infinity for Student's t (with nu at least 2)."""
    nu = max(nu, 2)
    log_c = gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * np.log(nu * np.pi)
    return (nu + z * z) / (nu - 1) * np.exp(log_c - (nu + 1) / 2 * np.log1p(z * z / nu))
