"""Moving-block bootstrap: a check of the profile intervals that assumes no noise model.

Residuals of the least-squares curve, scaled for the parameters it used, are laid out in blocks of
neighboring evaluations, so that drift over a few of them stays in every resample (Kunsch 1989).
All resamples are solved together on one grid of shapes, exactly in (A, R0) and to a cell in (B,
Cmid). Short blocks carry only a part of the correlation: if it is long, the percentile intervals
come out a little narrower than the profile intervals.
"""

from dataclasses import replace

import numpy as np

from .fit_result import Fit, Interval
from .likelihood_grid import build_map
from .solve import solve_cells

BLOCK = 4
"""Evaluations in a block: twice the correlation length of `noise`; at most a third of all."""


def bootstrap(f: Fit, n: int = 1000, block: int = BLOCK) -> dict[str, Interval]:
    """Return percentile intervals of A, B and Cmid at the fit's level from n >= 100 resamples.

    `block` neighboring evaluations are moved together; 1 is the plain bootstrap.
    """
    p, size = f.problem, len(f.problem.y)
    if n < 100:
        raise ValueError(f"{n} resamples give no 95% interval: use at least 100")
    length = max(1, min(block, size // 3))
    # Twelve times the usual reach: resamples scatter beyond the region of independent noise.
    m = build_map(p, reach=12.0)
    rng = np.random.default_rng(0)
    fitted = f.curve(f.series.compute[f.window.used])
    scale = np.diag(p.white)
    residual = (p.y - fitted) * scale * np.sqrt(size / max(p.dof, 1))
    residual -= residual.mean()
    starts = rng.integers(0, size - length + 1, (n, -(-size // length)))
    index = (starts[..., None] + np.arange(length)).reshape(n, -1)[:, :size]
    g = p.shape.g(p.x, m.u.reshape(-1, 1), m.v.reshape(-1, 1))
    draws = np.empty((3, n))
    for i, y in enumerate(fitted + residual[index] / scale):
        cells = solve_cells(replace(p, y=y), g)
        best = cells.point(int(np.argmin(cells.s_bounded)), m.u, m.v)
        draws[:, i] = best.a, p.shape.b(best.v), p.shape.cmid(best.u)
    estimates = {"B": (f.B, draws[1])}
    if not f.A.fixed:
        estimates["A"] = f.A, draws[0]
    if f.Cmid is not None:
        estimates["Cmid"] = f.Cmid, draws[2]
    level = f.options.level
    return {k: Interval.of_draws(i.value, d, level) for k, (i, d) in estimates.items()}
