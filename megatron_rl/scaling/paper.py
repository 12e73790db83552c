"""The procedure of arXiv 2510.13786: a grid over A and Cmid, and B by `curve_fit` in each cell.

A takes the values 0.450, 0.455 ... 0.800 and Cmid 100 linear values; `a_range` and `cmid_range`
replace the ranges (the paper's range of Cmid was rescaled for each run). Kept as `method="paper"`
so that published numbers can be compared; `solve.py` reaches an equal or smaller sum of squares in
a fraction of the time.
"""

import warnings
from itertools import product

import numpy as np
from scipy.optimize import OptimizeWarning, curve_fit

from .curve import MAX_B, MIN_B, Array
from .options import FitOptions
from .solve import FitProblem, Point

A_STEP = 0.005
CMID_VALUES = 100


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
