"""Least squares of one curve: variable projection over a grid, then refinement under bounds.

Given the shape (u, v) the curve is linear in (R0, A), so the grid has two dimensions only and each
of its cells is exact. The best cells start a bounded least-squares solve of all free parameters.

`solve_paper` is the procedure of arXiv 2510.13786, so that published numbers can be compared: a
grid over A (0.450, 0.455 ... 0.800) and 100 linear values of Cmid, and B by `curve_fit` in each
cell; `a_range` and `cmid_range` replace the ranges (the paper rescaled that of Cmid for each run).
`solve` reaches an equal or smaller sum of squares in a fraction of the time.
"""

import warnings
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.ndimage import minimum_filter
from scipy.optimize import OptimizeWarning, curve_fit, least_squares

from .curve import MAX_B, MIN_B, Array, Mask, Shape
from .options import FitOptions

A_STEP, CMID_VALUES = 0.005, 100  # of the paper's grid


@dataclass(frozen=True, slots=True)
class FitProblem:
    """Points to fit and the parameters that are held fixed."""

    shape: Shape
    x: Array  # abscissa of the points [n] (see Shape.x); -inf for an evaluation at compute 0
    y: Array
    white: Array  # whitening matrix [n, n]; its rows scale the residuals
    r0: float | None  # fixed reward at zero compute, or None to fit it (always for the power law)
    fix_a: float | None
    a_max: float

    @property
    def free(self) -> Mask:
        """True for those of A, R0, u and v that are fitted [4]."""
        return np.array([self.fix_a is None, self.r0 is None, self.shape.has_u, True])

    @property
    def dof(self) -> int:
        """Degrees of freedom of the noise."""
        return len(self.y) - int(self.free.sum())

    @property
    def a_floor(self) -> float:
        """Lower bound of A: a fixed R0, or 0."""
        return 0.0 if self.r0 is None else self.r0

    @property
    def r0_floor(self) -> float:
        """Lower bound of R0; the power law's value at the anchor has none."""
        return 0.0 if self.shape.has_u else -np.inf

    def jacobian(self, gain: Array | float, u: Array | float, v: Array | float) -> Array:
        """Return the whitened derivatives of curves by the free parameters [..., n, free].

        `gain` is A - R0; it, u and v broadcast against the points.
        """
        g = self.shape.g(self.x, u, v)
        gu, gv = self.shape.dg(self.x, u, v)
        columns = np.stack([g, 1 - g, gain * gu, gain * gv], axis=-1)
        return np.asarray(self.white @ columns[..., self.free])


@dataclass(frozen=True, slots=True)
class Point:
    """Least-squares solution; `s` is the whitened sum of squares."""

    a: float
    r0: float
    u: float
    v: float
    s: float


@dataclass(frozen=True, slots=True)
class CellSolutions:
    """Exact solution in (A, R0) of every cell, and the inverse Hessian of S/2 there [cells]."""

    s: Array  # unbounded least sum of squares
    s_bounded: Array  # least sum of squares with R0 <= A <= a_max
    a: Array
    r0: Array
    a_bounded: Array
    r0_bounded: Array
    v_aa: Array
    v_ar: Array
    v_rr: Array

    def point(self, k: int, u: Array, v: Array) -> Point:
        """Return the bounded solution of cell k; u and v are the shapes of all cells."""
        values = (self.a_bounded[k], self.r0_bounded[k], u.flat[k], v.flat[k], self.s_bounded[k])
        return Point(*map(float, values))


def solve_cells(p: FitProblem, g: Array) -> CellSolutions:
    """Solve the linear part for shapes g [cells, n]."""
    gw, y = g @ p.white.T, p.white @ p.y
    ew = p.white.sum(axis=1) - gw
    tiny = 1e-30
    gg, ee = (np.einsum("kn,kn->k", w, w) + tiny for w in (gw, ew))
    ge = np.einsum("kn,kn->k", gw, ew)
    gy, ey, yy = gw @ y, ew @ y, float(y @ y)
    zero = np.zeros(len(gw))

    def cost(a: Array, r: Array) -> Array:
        s = yy - 2 * a * gy - 2 * r * ey + a * a * gg + 2 * a * r * ge + r * r * ee
        return np.maximum(s, 0.0)

    if p.r0 is not None:
        r = rb = zero + p.r0
        a = (gy - r * ge) / gg if p.fix_a is None else zero + p.fix_a
        ab = np.clip(a, p.a_floor, p.a_max) if p.fix_a is None else a
        inverse = (1 / gg if p.fix_a is None else zero, zero, zero)
    elif p.fix_a is not None:
        a = ab = zero + p.fix_a
        r = (ey - a * ge) / ee
        rb = np.clip(r, p.r0_floor, p.fix_a)
        inverse = (zero, zero, 1 / ee)
    else:
        det = np.maximum(gg * ee - ge * ge, tiny)
        a, r = (gy * ee - ey * ge) / det, (ey * gg - gy * ge) / det
        inverse = (ee / det, -ge / det, gg / det)
        ab = np.clip(a, p.a_floor, p.a_max)
        rb = np.where(ab == a, r, (ey - ab * ge) / ee)
        low = rb < p.r0_floor
        rb = np.maximum(rb, p.r0_floor)
        ab = np.where(low, np.clip((gy - rb * ge) / gg, p.a_floor, p.a_max), ab)
        falling, level = ab < rb, (gy + ey) / (gg + ee + 2 * ge)
        ab, rb = np.where(falling, level, ab), np.where(falling, level, rb)
    return CellSolutions(cost(a, r), cost(ab, rb), a, r, ab, rb, *inverse)


def solve(p: FitProblem) -> Point:
    """Solve bounded least squares globally: exact cells of a grid, then scipy from the best two."""
    (u0, u1), (v0, v1) = p.shape.bounds()
    columns, rows = (48, 32) if p.shape.has_u else (1, 256)
    v, u = np.meshgrid(np.linspace(v0, v1, rows), np.linspace(u0, u1, columns), indexing="ij")
    cells = solve_cells(p, p.shape.g(p.x, u[..., None], v[..., None]).reshape(-1, len(p.x)))
    s = cells.s_bounded.reshape(u.shape)
    minima = np.flatnonzero(s <= minimum_filter(s, size=3, mode="constant", cval=np.inf))
    best = minima[np.argsort(cells.s_bounded[minima], kind="stable")][:2]
    return min((refine(p, cells.point(int(k), u, v)) for k in best), key=lambda point: point.s)


def refine(p: FitProblem, start: Point) -> Point:
    """Solve bounded trust-region least squares of all free parameters from one start."""
    (u0, u1), (v0, v1) = p.shape.bounds()
    lo = np.array([min(p.a_floor, p.a_max - 1e-9), p.r0_floor, u0, v0])[p.free]
    hi = np.array([p.a_max, p.a_max, u1, v1])[p.free]
    full = np.array([start.a, start.r0, start.u, start.v])

    def unpack(theta: Array) -> Array:
        out = full.copy()
        out[p.free] = theta
        return out

    def residual(theta: Array) -> Array:
        a, r0, u, v = unpack(theta)
        return p.white @ (r0 + (a - r0) * p.shape.g(p.x, u, v) - p.y)

    def jacobian(theta: Array) -> Array:
        a, r0, u, v = unpack(theta)
        return p.jacobian(a - r0, u, v)

    begin = np.clip(full[p.free], lo, hi)
    limits = {"xtol": 1e-10, "ftol": 1e-12, "gtol": 1e-14, "max_nfev": 200}
    out = least_squares(residual, begin, jacobian, (lo, hi), x_scale="jac", **limits)
    return Point(*map(float, (*unpack(out.x), 2 * out.cost)))


def paper_grid(p: FitProblem, options: FitOptions) -> tuple[Array, Array]:
    """Return the values of A and of Cmid."""
    low, high = options.a_range
    a = np.round(np.arange(low, high + A_STEP / 2, A_STEP), 6)
    scale = p.shape.scale
    return a, np.linspace(*(options.cmid_range or (0.015 * scale, 1.5 * scale)), CMID_VALUES)


def solve_paper(p: FitProblem, options: FitOptions) -> Point:
    """Solve least squares over the paper's grid.

    Raises:
        ValueError: R0 is not fixed, or the form has no midpoint: the paper defines neither.
    """
    if p.r0 is None or not p.shape.has_u:
        raise ValueError("--method paper needs a sigmoid form and a fixed R0: give --r0")
    r0 = p.r0
    a_values, cmid_values = paper_grid(p, options)
    if p.fix_a is not None:
        a_values = np.array([p.fix_a])
    a_values = a_values[(a_values > r0) & (a_values <= p.a_max)]
    if len(a_values) == 0:
        raise ValueError(f"--method paper has no A above R0 = {r0:g} in its range of A")
    best: Point | None = None
    y = p.white @ p.y - r0 * p.white.sum(axis=1)
    for a, cmid in product(a_values.tolist(), cmid_values.tolist()):
        u = p.shape.u(cmid)

        def curve(x: Array, b: float, a: float = a, u: float = u) -> Array:
            v = np.log(np.clip(b, MIN_B, MAX_B))
            return np.asarray((a - r0) * (p.white @ p.shape.g(x, u, v)))

        with warnings.catch_warnings(action="ignore", category=OptimizeWarning):
            try:
                (b,), _ = curve_fit(curve, p.x, y, p0=[2.0])
            except RuntimeError:  # curve_fit did not converge: skip the cell
                continue
        s = float(np.sum((curve(p.x, b) - y) ** 2))
        if best is None or s < best.s:
            best = Point(a, r0, u, float(np.log(np.clip(b, MIN_B, MAX_B))), s)
    if best is None:
        raise ValueError("curve_fit converged in no cell of the paper's grid: use --method fast")
    return best
