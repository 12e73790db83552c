"""Noise of the published curves: restricted likelihood of the covariance in `noise.py`.

    python benchmarks/scaling/noise.py > benchmarks/results/scaling_noise.md

Only points of the fit windows are used, none of the extrapolation markers.
"""

import numpy as np
from common import MADE, published, table

from megatron_rl.scaling.options import FitOptions
from megatron_rl.scaling.series import covariance, whitener
from megatron_rl.scaling.solve import solve
from megatron_rl.scaling.window import choose_window, make_problem

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
LENGTHS = (1.0, 2.0, 3.0, 5.0)


def restricted(white: np.ndarray, j: np.ndarray, r: np.ndarray) -> float:
    """Log restricted likelihood up to a constant, linear in the parameters around the fit."""
    q, t = np.linalg.qr(white @ j)
    rest = white @ r - q @ (q.T @ (white @ r))
    dof = len(r) - j.shape[1]
    log_det = np.log(np.diag(white)).sum() - np.log(np.abs(np.diag(t))).sum()
    return float(log_det - dof / 2 * np.log(rest @ rest))


def main() -> None:
    print(f"# Noise of the published evaluations\n\n{MADE}\n")
    options = FitOptions(r0=0.395, skip=1400.0)
    totals = np.zeros((len(SHARES), len(LENGTHS)))
    sigmas, lag = [], []
    series = [s for k, s in published().items() if not k.endswith("+")]
    for s in series:
        w = choose_window(s, options)
        p = make_problem(s.take(w.used), options, w.r0)
        a = solve(p)
        g = p.shape.g(p.x, a.u, a.v)
        gu, gv = p.shape.dg(p.x, a.u, a.v)
        r = p.y - (a.r0 + (a.a - a.r0) * g)
        j = np.stack([g, (a.a - a.r0) * gu, (a.a - a.r0) * gv], axis=1)
        sigmas.append(np.sqrt(a.s / (len(r) - 3)))
        lag.append(float(r[1:] @ r[:-1] / (r @ r)))
        c = s.compute[w.used]
        for i, share in enumerate(SHARES):
            for k, length in enumerate(LENGTHS):
                white = whitener(covariance(c, share, length=length))
                totals[i, k] += restricted(white, j, r)
    totals -= totals[0, 0]
    print(
        f"{len(series)} series. Residual standard deviation: median {np.median(sigmas):.4f}, "
        f"range {min(sigmas):.4f}-{max(sigmas):.4f}. Mean lag-1 autocorrelation of the residuals "
        f"{np.mean(lag):+.2f} (independent noise would give about -0.14 after three parameters).\n"
    )
    print("Log restricted likelihood above independent noise, summed over the series:\n")
    head = ["share that is correlated", *(f"length {x:g}" for x in LENGTHS)]
    table(
        head, [[f"{s:g}", *(f"{x:+.1f}" for x in t)] for s, t in zip(SHARES, totals, strict=True)]
    )


if __name__ == "__main__":
    main()
