"""Least squares of one curve: variable projection over a grid, then refinement under bounds.

Given the shape (u, v) the curve is linear in (R0, A), so the grid has two dimensions only and each
of its cells is exact. The best cells start a bounded least-squares solve of all free parameters.
"""

from dataclasses import dataclass

import numpy as np
from scipy.ndimage import minimum_filter
from scipy.optimize import least_squares

from .curve import Array, Shape


@dataclass(frozen=True, slots=True)
class FitProblem:
    """Points to fit and the parameters that are held fixed."""

    shape: Shape
    x: Array
    """Abscissa of the points [n] (see Shape.x); -inf for an evaluation at compute 0."""
    y: Array
    white: Array
    """Whitening matrix [n, n]; its rows scale the residuals that are squared and summed."""
    r0: float | None
    """Fixed reward at zero compute, or None to fit it (always None for the power law)."""
    fix_a: float | None
    a_max: float

    @property
    def free(self) -> int:
        """Number of free parameters."""
        return 1 + self.shape.has_u + (self.r0 is None) + (self.fix_a is None)

    @property
    def r0_floor(self) -> float:
        """Lower bound of R0; the power law's value at the anchor has none."""
        return 0.0 if self.shape.has_u else -np.inf


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

    s: Array
    """Unbounded least sum of squares."""
    s_bounded: Array
    """Least sum of squares with R0 <= A <= a_max."""
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
        return Point(*(float(value) for value in values))


def solve_cells(p: FitProblem, g: Array) -> CellSolutions:
    """Solve the linear part for shapes g [cells, n]."""
    gw = g @ p.white.T
    ones = p.white.sum(axis=1)
    y = p.white @ p.y
    zero = np.zeros(len(gw))
    tiny = 1e-30
    if p.r0 is not None:
        t = y - p.r0 * ones
        gg = np.einsum("kn,kn->k", gw, gw) + tiny
        gt = gw @ t
        tt = float(t @ t)
        r0 = zero + p.r0

        def cost(a: Array) -> Array:
            d = a - r0
            return np.maximum(tt - 2 * d * gt + d * d * gg, 0.0)

        if p.fix_a is not None:
            a = zero + p.fix_a
            s = cost(a)
            return CellSolutions(s, s, a, r0, a, r0, zero, zero, zero)
        a = r0 + gt / gg
        bounded = np.clip(a, p.r0, p.a_max)
        return CellSolutions(cost(a), cost(bounded), a, r0, bounded, r0, 1 / gg, zero, zero)

    ew = ones - gw
    gg = np.einsum("kn,kn->k", gw, gw) + tiny
    ee = np.einsum("kn,kn->k", ew, ew) + tiny
    ge = np.einsum("kn,kn->k", gw, ew)
    gy, ey, yy = gw @ y, ew @ y, float(y @ y)

    def cost2(a: Array, r: Array) -> Array:
        s = yy - 2 * a * gy - 2 * r * ey + a * a * gg + 2 * a * r * ge + r * r * ee
        return np.maximum(s, 0.0)

    def r_given(a: Array) -> Array:
        return (ey - a * ge) / ee

    if p.fix_a is not None:
        a = zero + p.fix_a
        r = r_given(a)
        rb = np.clip(r, p.r0_floor, p.fix_a)
        return CellSolutions(cost2(a, r), cost2(a, rb), a, r, a, rb, zero, zero, 1 / ee)
    det = np.maximum(gg * ee - ge * ge, tiny)
    a = (gy * ee - ey * ge) / det
    r = (ey * gg - gy * ge) / det
    ab = np.clip(a, 0.0, p.a_max)
    rb = np.where(ab == a, r, r_given(ab))
    low = rb < p.r0_floor
    if np.any(low):
        rb = np.where(low, p.r0_floor, rb)
        ab = np.where(low, np.clip((gy - rb * ge) / gg, 0.0, p.a_max), ab)
    level = (gy + ey) / (gg + ee + 2 * ge)
    falling = ab < rb
    ab, rb = np.where(falling, level, ab), np.where(falling, level, rb)
    return CellSolutions(cost2(a, r), cost2(ab, rb), a, r, ab, rb, ee / det, -ge / det, gg / det)


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
    free = np.array([p.fix_a is None, p.r0 is None, p.shape.has_u, True])
    (u0, u1), (v0, v1) = p.shape.bounds()
    lo = np.array([0.0, p.r0_floor, u0, v0])[free]
    hi = np.array([p.a_max, p.a_max, u1, v1])[free]
    if p.r0 is not None and p.fix_a is None:
        lo[0] = min(p.r0, p.a_max - 1e-9)
    full = np.array([start.a, start.r0, start.u, start.v])
    finite = np.isfinite(p.x)
    x = np.where(finite, p.x, 0.0)

    def unpack(theta: Array) -> Array:
        out = full.copy()
        out[free] = theta
        return out

    def residual(theta: Array) -> Array:
        a, r0, u, v = unpack(theta)
        g = p.shape.g(p.x, u, v)
        return p.white @ (r0 + (a - r0) * g - p.y)

    def jacobian(theta: Array) -> Array:
        a, r0, u, v = unpack(theta)
        g = p.shape.g(p.x, u, v)
        gu, gv = p.shape.dg(x, u, v)
        j = np.stack([g, 1 - g, (a - r0) * gu * finite, (a - r0) * gv * finite], axis=1)
        return np.asarray(p.white @ j[:, free])

    pad = 1e-9 * np.maximum(1.0, np.where(np.isfinite(hi), np.abs(hi), 1.0))
    out = least_squares(
        residual,
        np.clip(full[free], np.where(np.isfinite(lo), lo + pad, lo), hi - pad),
        jac=jacobian,
        bounds=(lo, hi),
        x_scale="jac",
        xtol=1e-10,
        ftol=1e-12,
        gtol=1e-14,
        max_nfev=200,
    )
    a, r0, u, v = (float(value) for value in unpack(out.x))
    return Point(a, r0, u, v, float(2 * out.cost))
