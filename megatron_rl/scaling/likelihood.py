"""The map of all curves that the data allow: intervals, bands and probabilities read off one grid.

The likelihood of correlated Gaussian noise of unknown size is computed exactly in (A, R0) on a grid
of shapes (u, v) that is sheared along the ridge and zoomed until it fits the plausible region.

* Profile-likelihood region: shapes and rewards with ``S <= S_min (1 + F(level; 1, n-p) / (n-p))``.
  Intervals of A, B, Cmid and the band are its extremes, so the band at infinite compute is the
  interval of A, and each bound is monotone in compute because each curve is.
* Weights: the posterior under Jeffreys' prior, which keeps probabilities in step with the intervals
  (a flat prior would favour the long ridge towards high A). Means and draws come from them.
* Evidence: the marginal likelihood, flat in A on [R0, a_max], ln Cmid, ln B and ln sigma; it only
  compares noise models.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from scipy.special import gammaln, stdtr, stdtrit
from scipy.stats import f as f_distribution

from .curve import Array, Index, Mask
from .noise import FLOOR
from .solve import Linear, Point, Problem, linear, refine, solve

WIDE = 0.9999
"""Level of the region that the grid covers; the weights beyond it are dropped."""


@dataclass(frozen=True)
class Map:
    """Grid of shapes [rows, columns] with the exact linear solution of each cell."""

    problem: Problem
    centre: Point
    """Minimum of the correlated-noise sum of squares."""
    u: Array
    v: Array
    cells: Linear
    log_weight: Array
    """Log of the weight of each cell before Jeffreys' prior, its area included [rows * columns]."""
    mean_a: Array
    mean_r0: Array
    dof: int
    log_evidence: float
    """Log marginal likelihood up to a constant of the data; compares noise models."""

    @cached_property
    def weight(self) -> Array:
        """Normalised weight of each cell [rows * columns]."""
        keep = np.flatnonzero(np.isfinite(self.log_weight))
        gain = (self.mean_a - self.mean_r0)[keep]
        u, v = self.u.ravel()[keep], self.v.ravel()[keep]
        log_j = self.log_weight[keep] + _log_jeffreys(self.problem, u, v, gain)
        out = np.zeros(self.u.size)
        out[keep] = np.exp(log_j - log_j.max())
        return out / out.sum()

    @property
    def sigma(self) -> float:
        """Noise of one evaluation (standard deviation, in pass rate)."""
        return float(np.sqrt(_variance(self.centre.s, self.dof)))

    def threshold(self, level: float) -> float:
        """Sum of squares at the edge of the region."""
        return threshold(self.centre.s, self.dof, level)

    def reach(self, variance: Array, level: float) -> Array:
        """Half-width of a linear quantity in each cell at the edge; nan outside the region."""
        room = self.threshold(level) - self.cells.s
        return np.where(room >= 0, np.sqrt(np.maximum(room, 0) * variance), np.nan)

    def a_range(self, level: float) -> tuple[Array, Array]:
        """Least and greatest A of each cell in the region [cells]; nan outside."""
        half = self.reach(self.cells.v_aa, level)
        low = np.maximum(self.cells.a - half, self.floor)
        high = np.minimum(self.cells.a + half, self.problem.a_max)
        out = low > high
        return np.where(out, np.nan, low), np.where(out, np.nan, high)

    @property
    def floor(self) -> Array:
        """A is not below R0."""
        return self.cells.r0 if self.problem.r0 is not None else np.zeros_like(self.cells.a)

    def interval_a(self, level: float) -> tuple[float, float]:
        """Profile-likelihood interval of A."""
        low, high = self.a_range(level)
        if np.all(np.isnan(low)):
            return self.centre.a, self.centre.a
        return min(float(np.nanmin(low)), self.centre.a), max(float(np.nanmax(high)), self.centre.a)

    def interval_r0(self, level: float) -> tuple[float, float]:
        """Profile-likelihood interval of R0 (for the power law: of the value at the anchor)."""
        half = self.reach(self.cells.v_rr, level)
        if np.all(np.isnan(half)):
            return self.centre.r0, self.centre.r0
        low, high = self.cells.r0 - half, self.cells.r0 + half
        low = np.maximum(low, self.problem.r0_floor)
        return float(np.nanmin(low)), float(np.nanmax(high))

    def interval_u(self, level: float) -> tuple[float, float]:
        """Profile-likelihood interval of u."""
        s = self.cells.s_bounded.reshape(self.u.shape)
        return _crossing(self.u, s, self.threshold(level), self.centre.u)

    def interval_v(self, level: float) -> tuple[float, float]:
        """Profile-likelihood interval of v."""
        s = self.cells.s_bounded.reshape(self.u.shape).min(axis=1)
        return _crossing(self.v[None, :, 0], s[None], self.threshold(level), self.centre.v)

    def curve_range(self, compute: Array, levels: Array) -> tuple[Array, Array]:
        """Least and greatest curve value of each level's region at each compute [levels, m]."""
        keep = np.flatnonzero(self.cells.s_bounded <= self.threshold(float(levels.max())))
        if len(keep) == 0:
            keep = np.array([int(np.argmin(self.cells.s_bounded))])
        g = self._g(compute, keep)
        low = np.empty((len(levels), len(compute)))
        high = np.empty_like(low)
        mid = self.mean_curve(compute)
        c, e = self.cells, 1 - g
        spread = np.sqrt(
            np.maximum(
                c.v_aa[keep, None] * g**2
                + 2 * c.v_ar[keep, None] * g * e
                + c.v_rr[keep, None] * e**2,
                0,
            )
        )
        centre = c.a[keep, None] * g + c.r0[keep, None] * e
        for i, level in enumerate(levels):
            low_a, high_a = (t[keep, None] for t in self.a_range(float(level)))
            inside = np.isfinite(low_a[:, 0])
            if not inside.any():
                low[i] = high[i] = mid
                continue
            if self.problem.r0 is not None:
                r0 = self.problem.r0
                low[i] = (r0 + (low_a[inside] - r0) * g[inside]).min(axis=0)
                high[i] = (r0 + (high_a[inside] - r0) * g[inside]).max(axis=0)
            else:
                room = np.sqrt(np.maximum(self.threshold(float(level)) - c.s[keep[inside]], 0))
                half = room[:, None] * spread[inside]
                low[i] = (centre[inside] - half).min(axis=0)
                high[i] = np.minimum(centre[inside] + half, self.problem.a_max).max(axis=0)
        if self.problem.r0 is None:
            # Pairs with R0 > A fall with compute and are no curves: monotone envelopes drop them.
            order = np.argsort(compute, kind="stable")
            back = np.argsort(order, kind="stable")
            low = np.maximum.accumulate(low[:, order], axis=1)[:, back]
            rising = np.minimum.accumulate(high[:, order][:, ::-1], axis=1)[:, ::-1]
            high = np.maximum(rising[:, back], low)
        return low, high

    def mean_curve(self, compute: Array) -> Array:
        """Average of the curves by their weight at each compute [m]."""
        keep = np.flatnonzero(self.weight > 1e-7)
        g = self._g(compute, keep)
        a, r0, w = self.mean_a[keep, None], self.mean_r0[keep, None], self.weight[keep, None]
        return np.asarray((w * (r0 + (a - r0) * g)).sum(axis=0) / w.sum())

    def draw(self, n: int, seed: int) -> tuple[Array, Array, Array, Array]:
        """Draw n curves by weight: arrays A, R0, u, v [n]."""
        rng = np.random.default_rng(seed)
        k = rng.choice(len(self.weight), size=n, p=self.weight)
        c, nu = self.cells, max(self.dof_t, 1)
        scale = np.sqrt(np.maximum(_variance(c.s[k], nu), 1e-18) * c.v_aa[k])
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
            noise = np.sqrt(rest * _variance(c.s[k], nu)) * rng.standard_t(nu, n)
            r0 = np.clip(r0 + slope * (a - c.a[k]) + noise, self.problem.r0_floor, a)
        # Half a cell of jitter: the grid is a quadrature, not a set of atoms.
        du, dv = _steps(self.u, self.v)
        u = self.u.ravel()[k] + du.ravel()[k] * rng.uniform(-0.5, 0.5, n)
        return a, r0, u, self.v.ravel()[k] + dv * rng.uniform(-0.5, 0.5, n)

    @property
    def dof_t(self) -> int:
        """Degrees of freedom of A inside one cell."""
        return len(self.problem.y) - (2 if self.problem.r0 is None else 1)

    def _g(self, compute: Array, keep: Index) -> Array:
        shape = self.problem.shape
        return shape.g(
            shape.x(compute)[None], self.u.ravel()[keep, None], self.v.ravel()[keep, None]
        )


def _variance(s: Array | float, dof: int) -> Array:
    return np.maximum(np.asarray(s) / dof, FLOOR**2)


def threshold(s_min: float, dof: int, level: float) -> float:
    """Edge of the profile-likelihood region for noise of unknown size (F with 1 and dof)."""
    return s_min + _quantile(level, dof) * float(_variance(s_min, dof))


@cache
def _quantile(level: float, dof: int) -> float:
    return float(f_distribution.ppf(level, 1, dof))


def build(
    p: Problem,
    log_det: float = 0.0,
    start: Point | None = None,
    rows: int = 51,
    columns: int = 51,
    reach: float = 1.0,
) -> Map:
    """Compute the map of a problem; the grid is zoomed until the region fills it.

    Args:
        p: the problem, whitened.
        log_det: log determinant of its noise covariance, for `Map.log_evidence`.
        start: where the minimum is looked for; None: everywhere.
        rows: cells in v.
        columns: cells in u.
        reach: multiplies the distance of the grid's edge from the minimum of S.
    """
    n = len(p.y)
    dof = n - p.free
    if dof < 1:
        raise ValueError(f"{n} points leave no freedom beside {p.free} parameters")
    centre = solve(p) if start is None else refine(p, start)
    (u0, u1), (v0, v1) = p.shape.bounds()
    if not p.shape.has_u:
        rows, columns = 4 * rows, 1
    lo_u, hi_u = np.full(rows, u0), np.full(rows, u1)
    v = np.linspace(v0, v1, rows)
    for zoom in range(9):
        u = np.linspace(lo_u, hi_u, columns, axis=1)
        vv = np.repeat(v[:, None], columns, axis=1)
        cells = linear(p, p.shape.g(p.x, u[..., None], vv[..., None]).reshape(-1, n))
        s = cells.s_bounded.reshape(u.shape)
        if s.min() < centre.s:
            centre = _refine_from(p, cells, u, vv)
        edge = threshold(centre.s, dof, WIDE)
        inside = s <= centre.s + reach * (edge - centre.s)
        if (inside.mean() > 0.3 and zoom > 0) or zoom == 8:
            break
        v, lo_u, hi_u = _zoom(v, u, s, inside, centre, (v0, v1), (u0, u1))
    return _weigh(p, centre, u, vv, cells, dof, log_det)


def _refine_from(p: Problem, cells: Linear, u: Array, v: Array) -> Point:
    """Refine from the lowest cell: used when the zoomed grid finds a lower valley than `solve`."""
    k = int(np.argmin(cells.s_bounded))
    start = Point(
        float(cells.a_bounded[k]),
        float(cells.r0_bounded[k]),
        float(u.ravel()[k]),
        float(v.ravel()[k]),
        float(cells.s_bounded[k]),
    )
    point = refine(p, start)
    return point if point.s < start.s else start


def _zoom(
    v: Array,
    u: Array,
    s: Array,
    inside: Mask,
    centre: Point,
    v_box: tuple[float, float],
    u_box: tuple[float, float],
) -> tuple[Array, Array, Array]:
    """New rows and, for each of them, the stretch of u that holds the region (one cell spare)."""
    rows, columns = u.shape
    step_u = (u[:, -1] - u[:, 0]) / max(columns - 1, 1)
    lowest = np.take_along_axis(u, np.argmin(s, axis=1)[:, None], axis=1)[:, 0]
    lo = np.where(inside, u, np.inf).min(axis=1)
    hi = np.where(inside, u, -np.inf).max(axis=1)
    empty = ~inside.any(axis=1)
    lo = np.where(empty, lowest, lo) - step_u
    hi = np.where(empty, lowest, hi) + step_u
    step_v = v[1] - v[0]
    live = v[~empty]
    v_lo = min(live.min() if len(live) else np.inf, centre.v) - step_v
    v_hi = max(live.max() if len(live) else -np.inf, centre.v) + step_v
    new_v = np.linspace(max(v_lo, v_box[0]), min(v_hi, v_box[1]), rows)
    # Each new row spans what its two old neighbours span, and the centre near its own row.
    near = np.clip(np.searchsorted(v, new_v), 1, rows - 1)
    new_lo = np.minimum(lo[near - 1], lo[near])
    new_hi = np.maximum(hi[near - 1], hi[near])
    close = np.abs(new_v - centre.v) <= step_v
    new_lo = np.where(close, np.minimum(new_lo, centre.u), new_lo)
    new_hi = np.where(close, np.maximum(new_hi, centre.u), new_hi)
    return new_v, np.clip(new_lo, *u_box), np.clip(new_hi, *u_box)


def _steps(u: Array, v: Array) -> tuple[Array, float]:
    """Cell sizes: du [rows, columns] (one value per row) and dv."""
    columns = u.shape[1]
    du = (u[:, -1] - u[:, 0]) / (columns - 1) if columns > 1 else np.zeros(len(u))
    return np.repeat(du[:, None], columns, axis=1), float(v[1, 0] - v[0, 0])


def _weigh(
    p: Problem, centre: Point, u: Array, v: Array, cells: Linear, dof: int, log_det: float
) -> Map:
    """Marginal likelihood of each cell and the mean of (A, R0) in it."""
    n = len(p.y)
    nu = max(n - (2 if p.r0 is None else 1), 1)
    # A noise floor keeps the weights finite on data without noise.
    floor = nu * FLOOR**2 if centre.s < nu * FLOOR**2 else 0.0
    s = cells.s + floor + 1e-300
    area = _steps(u, v)[0].ravel() if p.shape.has_u else np.ones(u.size)
    if p.fix_a is not None:
        log_w = -0.5 * n * np.log(s) + 0.5 * np.log(np.where(cells.v_rr > 0, cells.v_rr, 1.0))
        mean_a, mean_r0 = cells.a_bounded, cells.r0_bounded
    else:
        low = cells.r0 if p.r0 is not None else np.zeros_like(s)
        scale = np.sqrt(s * cells.v_aa / nu)
        z0, z1 = (low - cells.a) / scale, (p.a_max - cells.a) / scale
        # Upper tail by symmetry, so that a cell far above a_max keeps a finite weight.
        mass = np.where(z0 > 0, stdtr(nu, -z0) - stdtr(nu, -z1), stdtr(nu, z1) - stdtr(nu, z0))
        mass = np.maximum(mass, 1e-300)
        volume = cells.v_aa if p.r0 is not None else cells.v_aa * cells.v_rr - cells.v_ar**2
        log_w = -0.5 * nu * np.log(s) + 0.5 * np.log(np.maximum(volume, 1e-300)) + np.log(mass)
        shift = (_tail(z0, nu) - _tail(z1, nu)) / mass
        mean_a = np.clip(cells.a + scale * shift, low, p.a_max)
        slope = np.divide(cells.v_ar, cells.v_aa, out=np.zeros_like(s), where=cells.v_aa > 0)
        mean_r0 = cells.r0 + slope * (mean_a - cells.a)
        mean_r0 = np.clip(mean_r0, p.r0_floor, mean_a) if p.r0 is None else cells.r0
    log_w = np.where(cells.s_bounded <= threshold(centre.s, dof, WIDE), log_w, -np.inf)
    if not np.isfinite(log_w).any():
        log_w[int(np.argmin(cells.s_bounded))] = 0.0
    cell = area if area.sum() > 0 else np.ones_like(area)
    top = float(log_w.max())
    evidence = np.log((np.exp(log_w - top) * cell).sum() * _steps(u, v)[1]) + top - 0.5 * log_det
    with np.errstate(divide="ignore"):
        log_w = log_w + np.log(cell)
    return Map(p, centre, u, v, cells, log_w, mean_a, mean_r0, dof, float(evidence))


def _log_jeffreys(p: Problem, u: Array, v: Array, gain: Array) -> Array:
    """Log of Jeffreys' prior, sqrt(det of the Fisher information), at the mean of each cell."""
    finite = np.isfinite(p.x)
    x = np.where(finite, p.x, 0.0)
    gu, gv = p.shape.dg(x, u[:, None], v[:, None])
    g = p.shape.g(p.x, u[:, None], v[:, None])
    columns = [gv * finite * gain[:, None]]
    if p.shape.has_u:
        columns.append(gu * finite * gain[:, None])
    if p.fix_a is None:
        columns.append(g)
    if p.r0 is None:
        columns.append(1 - g)
    j = np.stack(columns, axis=2).transpose(0, 2, 1) @ p.white.T
    det = np.linalg.det(j @ j.transpose(0, 2, 1))
    return np.asarray(0.5 * np.log(np.maximum(det, 1e-300)))


def _tail(z: Array, nu: int) -> Array:
    """Integral of t f(t) from z to infinity for Student's t (for nu = 1: truncated at 1e3)."""
    nu_ = max(nu, 2)
    log_c = gammaln((nu_ + 1) / 2) - gammaln(nu_ / 2) - 0.5 * np.log(nu_ * np.pi)
    density = np.exp(log_c - (nu_ + 1) / 2 * np.log1p(z * z / nu_))
    return (nu_ + z * z) / (nu_ - 1) * density


def _crossing(x: Array, s: Array, edge: float, centre: float) -> tuple[float, float]:
    """Least and greatest x with s <= edge over rows [r, k], linear between neighbours."""
    inside = s <= edge
    if not inside.any():
        return centre, centre
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
    return min(low, centre), max(high, centre)
