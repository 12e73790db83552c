"""Forecasts beyond the data: the curve of the estimates and the expected curve.

python benchmarks/scaling/prediction.py > benchmarks/results/scaling_prediction.md
"""

import sys

import numpy as np
from common import MADE, SIGMA, table

from megatron_rl.scaling import fit, log_sigmoid
from megatron_rl.scaling.series import covariance


def main(draws: int) -> None:
    print(f"# Forecasts beyond the data\n\n{MADE}\n")
    print(
        f"{draws} synthetic runs of 22 evaluations per row (A .45-.75, B 1-5, R0 .1-.4, noise "
        f"{SIGMA}, correlated as published); root mean square error of the noiseless curve at 1.5, "
        "2 and 4 times the compute of the fit (`curve`: of the estimates, `expected`: the average "
        "of the plausible curves), and coverage of the 95% band of the curve.\n"
    )
    rows = []
    for end in (0.7, 1.0, 1.5, 2.0, 3.0):
        rng = np.random.default_rng(5)
        errors, inside, ill = [], [], 0
        for _ in range(draws):
            b = float(np.exp(rng.uniform(0, np.log(5))))
            truth = {"A": rng.uniform(0.45, 0.75), "B": b, "Cmid": 1e4, "R0": rng.uniform(0.1, 0.4)}
            c = np.linspace(0.15, 1, 22) * end * 1e4
            noise = np.linalg.cholesky(covariance(c, 0.9)) @ rng.normal(size=22)
            y = np.clip(log_sigmoid(c, **truth) + SIGMA * noise, 0, 1)
            f = fit(c, y, r0=truth["R0"], skip=0)
            ahead = np.array([1.5, 2, 4]) * c[-1]
            real = log_sigmoid(ahead, **truth)
            low, high = f.band(ahead, kind="curve")
            errors.append([(f.curve(ahead) - real) ** 2, (f.predict(ahead) - real) ** 2])
            inside.append((real >= low) & (real <= high))
            ill += not f.well_conditioned
        rmse = np.sqrt(np.mean(errors, axis=(0, 2)))
        row = [f"{end:g} Cmid", f"{rmse[0]:.4f}", f"{rmse[1]:.4f}", f"{np.mean(inside):.1%}"]
        rows.append([*row, f"{ill / draws:.0%}"])
    head = ["data end at", "curve", "expected", "in band", "reported ill-conditioned"]
    table(head, rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 150)
