"""Building of the likelihood map: a grid of shapes, sheared along the ridge and zoomed.

The grid is zoomed until the plausible region fills it; then every cell gets its weight.
"""

import numpy as np
from scipy.special import gammaln, stdtr

from .curve import Array, Mask
from .likelihood import LikelihoodMap, cell_sizes, degrees_in_cell, threshold
from .noise import FLOOR
from .solve import CellSolutions, FitProblem, Point, refine, solve, solve_cells

WIDE = 0.9999
"""Level of the region that the grid covers; the weights beyond it are dropped."""
CELLS = 51
"""Cells of the grid in each direction."""


def build_map(
    p: FitProblem, log_det: float = 0.0, start: Point | None = None, reach: float = 1.0
) -> LikelihoodMap:
    """Compute the likelihood map of a problem.

    `log_det` is of the noise covariance, for `log_evidence`; the search for the minimum begins at
    `start`, or is global; `reach` multiplies the distance of the grid's edge from the minimum of S.
    """
    n = len(p.y)
    if p.dof < 1:
        raise ValueError(f"{n} points leave no degree of freedom for {n - p.dof} parameters")
    center = solve(p) if start is None else refine(p, start)
    (u0, u1), (v0, v1) = p.shape.bounds()
    rows, columns = (CELLS, CELLS) if p.shape.has_u else (4 * CELLS, 1)
    lo_u, hi_u = np.full(rows, u0), np.full(rows, u1)
    v = np.linspace(v0, v1, rows)
    for zoom in range(9):
        u = np.linspace(lo_u, hi_u, columns, axis=1)
        vv = np.repeat(v[:, None], columns, axis=1)
        cells = solve_cells(p, p.shape.g(p.x, u[..., None], vv[..., None]).reshape(-1, n))
        s = cells.s_bounded.reshape(u.shape)
        if s.min() < center.s:
            # The zoomed grid has reached a lower valley than `solve`.
            lowest = cells.point(int(np.argmin(s)), u, vv)
            refined = refine(p, lowest)
            center = refined if refined.s < lowest.s else lowest
        edge = threshold(center.s, p.dof, WIDE)
        inside = s <= center.s + reach * (edge - center.s)
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
    lo = np.where(empty, lowest, lo) - step_u
    hi = np.where(empty, lowest, hi) + step_u
    step_v = v[1] - v[0]
    live = v[~empty]
    v_lo = live.min(initial=center.v) - step_v
    v_hi = live.max(initial=center.v) + step_v
    new_v = np.linspace(max(v_lo, v_box[0]), min(v_hi, v_box[1]), rows)
    # Each new row spans the range of its two old neighbors, and the center if it is near.
    near = np.clip(np.searchsorted(v, new_v), 1, rows - 1)
    new_lo = np.minimum(lo[near - 1], lo[near])
    new_hi = np.maximum(hi[near - 1], hi[near])
    close = np.abs(new_v - center.v) <= step_v
    new_lo = np.where(close, np.minimum(new_lo, center.u), new_lo)
    new_hi = np.where(close, np.maximum(new_hi, center.u), new_hi)
    return new_v, np.clip(new_lo, *u_box), np.clip(new_hi, *u_box)


def _weigh(
    p: FitProblem, center: Point, u: Array, v: Array, cells: CellSolutions, log_det: float
) -> LikelihoodMap:
    """Compute the marginal likelihood of each cell and the mean of (A, R0) in it."""
    n, nu = len(p.y), max(degrees_in_cell(p), 1)
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
    log_w = np.where(cells.s_bounded <= threshold(center.s, p.dof, WIDE), log_w, -np.inf)
    if not np.isfinite(log_w).any():
        log_w[int(np.argmin(cells.s_bounded))] = 0.0
    du, dv = cell_sizes(u, v)
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
    weight = weight / weight.sum()
    return LikelihoodMap(p, center, u, v, cells, weight, mean_a, mean_r0, float(evidence))


def _tail_mean(z: Array, nu: int) -> Array:
    """Return the integral of t f(t) from z to infinity for Student's t (with nu at least 2)."""
    nu_ = max(nu, 2)
    log_c = gammaln((nu_ + 1) / 2) - gammaln(nu_ / 2) - 0.5 * np.log(nu_ * np.pi)
    density = np.exp(log_c - (nu_ + 1) / 2 * np.log1p(z * z / nu_))
    return (nu_ + z * z) / (nu_ - 1) * density
