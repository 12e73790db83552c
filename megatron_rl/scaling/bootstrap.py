"""Moving-block bootstrap: a check of the profile intervals that assumes no noise model.

Residuals of the least-squares curve, scaled for the parameters it used, are laid out in blocks of
neighbouring evaluations, so that drift over a few of them stays in every resample (Kunsch 1989).
All resamples are solved together on one grid of shapes, exactly in (A, R0) and to a cell in (B,
Cmid). Blocks of few evaluations carry less than all of the correlation: the percentile intervals
come out a little narrower than the profile intervals where it is long.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .curve import Array
from .likelihood import build
from .solve import linear

if TYPE_CHECKING:
    from .fitting import Fit, Interval

BLOCK = 4
"""Evaluations in a block: twice the correlation length of `noise`; at most a third of all."""


def bootstrap(
    f: "Fit", n: int = 1000, block: int | None = None, seed: int = 0
) -> dict[str, "Interval"]:
    """Percentile intervals of A, B and Cmid at the fit's level from n resamples.

    Args:
        f: the fit.
        n: number of resamples, at least 100.
        block: neighbouring evaluations that are moved together; 1 is the plain bootstrap.
        seed: of the resampling.
    """
    from .fitting import Interval

    p, size = f._problem, len(f._problem.y)
    if n < 100:
        raise ValueError(f"{n} resamples give no 95% interval: use at least 100")
    length = max(1, min(BLOCK if block is None else block, size // 3))
    # Twelve times the usual reach: resamples lie wider than the region of independent noise.
    m = build(p, reach=12.0)
    rng = np.random.default_rng(seed)
    fitted = f.curve(f.series.compute[f.window.used])
    scale = np.diag(p.white)
    residual = (p.y - fitted) * scale * np.sqrt(size / max(size - p.free, 1))
    residual -= residual.mean()
    starts = rng.integers(0, size - length + 1, (n, -(-size // length)))
    index = (starts[..., None] + np.arange(length)).reshape(n, -1)[:, :size]
    resampled = fitted + residual[index] / scale
    g = p.shape.g(p.x, m.u.reshape(-1, 1), m.v.reshape(-1, 1))
    a, b, cmid = np.empty(n), np.empty(n), np.empty(n)
    for i, y in enumerate(resampled):
        cells = linear(replace(p, y=y), g)
        k = int(np.argmin(cells.s_bounded))
        a[i] = cells.a_bounded[k]
        b[i] = p.shape.b(m.v.ravel()[k])
        cmid[i] = p.shape.cmid(m.u.ravel()[k])
    tail = (1 - f.level) / 2

    def made(value: float, draws: Array) -> Interval:
        low, high = (float(q) for q in np.quantile(draws, [tail, 1 - tail]))
        return Interval(value, min(low, value), max(high, value))

    out = {"B": made(f.B.value, b)}
    if not f.A.fixed:
        out["A"] = made(f.A.value, a)
    if f.Cmid is not None:
        out["Cmid"] = made(f.Cmid.value, cmid)
    return out
