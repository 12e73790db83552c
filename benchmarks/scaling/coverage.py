"""Coverage of the 95% intervals on synthetic runs, for independent and for correlated noise.

python benchmarks/scaling/coverage.py > benchmarks/results/scaling_coverage.md
"""

import sys

import numpy as np
from common import MADE, SIGMA, synthetic, table

from megatron_rl.scaling import fit
from megatron_rl.scaling.options import FitOptions

NOISES = {
    "independent": (0.0, 2.0),
    "correlated, as published (share 0.9, length 2)": (0.9, 2.0),
    "correlated, half of the variance": (0.5, 2.0),
}
DEFAULT = FitOptions().correlated
MODELS = {"default": DEFAULT, "independent only": 0.0, "correlated only": 1.0}


def main(draws: int) -> None:
    print(f"# Coverage of the 95% intervals\n\n{MADE}\n")
    print(
        f"{draws} synthetic runs per noise: 20-30 evaluations, A .45-.75, B 1-5, R0 .1-.4, "
        f"ending at 2-4 Cmid, noise {SIGMA}; the last one is held out. "
        "R0 given, start not skipped (`skip=0`) unless stated.\n"
    )
    head = ["noise", "model of the fit", "A", "B", "Cmid", "median width of A", "band"]
    rows = []
    for noise, (share, length) in NOISES.items():
        settings = [(label, {"correlated": p, "skip": 0.0}) for label, p in MODELS.items()]
        settings.append(("default, automatic skip", {"correlated": DEFAULT, "skip": None}))
        for label, options in settings:
            hits, widths = [], []
            for truth, c, y in synthetic(11, draws, share, length):
                f = fit(c, y, r0=truth["R0"], fit_until=float(c[-1]) * 0.999, **options)
                inside = [
                    i.low <= truth[k] <= i.high
                    for k, i in (("A", f.A), ("B", f.B), ("Cmid", f.Cmid))
                ]
                assert f.prediction is not None
                hits.append([*inside, f.prediction.coverage])
                widths.append(f.A.high - f.A.low)
            cells = [f"{x:.1%}" for x in np.mean(hits, axis=0)]
            rows.append([noise, label, *cells[:3], f"{np.median(widths):.3f}", cells[3]])
    table(head, rows)
    print("`band`: share of last evaluations inside the band of a fit to all others.")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
