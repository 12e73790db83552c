"""Coverage of the default fit, without any option, on runs whose R0 is not in the data.

python benchmarks/scaling/defaults.py > benchmarks/results/scaling_defaults.md
"""

import sys

import numpy as np
from common import MADE, SIGMA, published, synthetic, table

from megatron_rl.scaling import fit

NOISES = {"independent": 0.0, "half of it drifts": 0.5, "as published (0.9 drifts)": 0.9}


def main(draws: int) -> None:
    print(f"# The default fit of runs that begin after compute 0\n\n{MADE}\n")
    print(
        f"{draws} synthetic runs per noise: 20-30 evaluations from 0.3 to 2-4 Cmid, A .45-.75, "
        f"B 1-5, R0 .1-.4, noise {SIGMA}. `fit(compute, reward)` without options; the truth must "
        "lie in the 95% interval of A.\n"
    )
    head = ["noise", "in the interval", "in it or ill-conditioned", "good", "in it, of the good"]
    head += ["median width of A", "error of ill A: median", "least squares"]
    rows = []
    for noise, share in NOISES.items():
        inside, good, width, errors = [], [], [], []
        for truth, c, y in synthetic(17, draws, share):
            f = fit(c, y)
            inside.append(f.A.low <= truth["A"] <= f.A.high)
            good.append(f.well_conditioned)
            width.append(f.A.high - f.A.low)
            if not f.well_conditioned:
                errors.append((f.A.value - truth["A"], f.least_squares.a - truth["A"]))
        hit, well = np.array(inside), np.array(good)
        shares = [hit.mean(), (hit | ~well).mean(), well.mean(), hit[well].mean()]
        rms = np.sqrt(np.mean(np.array(errors) ** 2, axis=0))
        cells = [f"{x:.1%}" for x in shares] + [f"{np.median(width):.3f}"]
        rows.append([noise, *cells, *(f"{x:.3f}" for x in rms)])
    table(head, rows)
    print("The last columns are root mean square errors of A over the ill-conditioned runs.\n")

    print("## Published points without options\n")
    rows = []
    for name, s in published().items():
        f = fit(s)
        codes = ", ".join(w.code for w in f.warnings if w.serious) or "good"
        rows.append([name, f"{f.A:.3f}", f"{f.B:.2f}", f"{f.R0:.3f}", codes])
    table(["series", "A", "B", "R0", "verdict"], rows)
    (why,) = [w for w in fit(published()["scalerl_8b_bs768_14k"]).warnings if w.serious]
    print(f"scalerl_8b_bs768_14k (published: A .610, B 1.92): {why}.")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
