"""Published points: parameters, prediction of held-out points, ill-conditioned series, shared A.

python benchmarks/scaling/points.py > benchmarks/results/scaling_points.md
"""

from common import MADE, published, table

from megatron_rl.scaling import Fit, fit

R0, SKIP = 0.395, 1400.0


def row(label: str, f: Fit, published_values: str) -> list[str]:
    verdict = (
        "good"
        if f.well_conditioned
        else "ill: " + ", ".join(w.code for w in f.warnings if w.serious)
    )
    cmid = "-" if f.Cmid is None else f"{f.Cmid:amount}"
    return [label, str(f.n), f"{f.A:.3f}", f"{f.B:.2f}", cmid, verdict, published_values]


def main() -> None:
    data = published()
    print(f"# Published points\n\n{MADE}\n")
    print(f"R0 {R0}, points up to {SKIP:g} GPU-hours skipped, intervals 95%, unless stated.\n")
    head = ["series", "n", "A", "B", "Cmid", "verdict", "paper's procedure on these points"]
    seen = {
        "baseline_dapo_pipelinerl8": ".520 / 4.4-4.7",
        "gspo": ".590 / 1.75",
        "cispo": ".590 / 2.45",
        "cispo_eps5": ".595 / 2.27",
        "scalerl_8b_bs768_14k": ".600 / 2.2",
        "scalerl_bs512": ".605 / 1.86",
        "scalerl_32k": ".795, ill on purpose",
        "cispo_eps4": ".67, ill on purpose",
    }
    rows = [
        row(k, fit(s, r0=R0, skip=SKIP), seen.get(k, ""))
        for k, s in data.items()
        if not k.endswith("+")
    ]
    s = data["scalerl_bs2048+"]
    window = {"skip": 1500.0, "fit_until": 50000.0}
    rows.append(row("bs2048 (1.5k, 50k)", fit(s, r0=R0, **window), ".635 / 1.84"))
    power = fit(s, form="power-law", **window)
    rows.append(row("bs2048 (1.5k, 50k), power law", power, "1.000, at its bound"))
    power = fit(s, form="power-law", skip=5000.0, fit_until=50000.0)
    rows.append(row("bs2048 (5k, 50k), power law", power, ".725"))
    shared = fit(data["scalerl_8b_bs768_14k"], r0=R0, skip=SKIP, fix_a=0.605)
    rows.append(row("14k at A = .605", shared, "B 2.09; 2.01 printed"))
    table(head, rows)

    print("## Prediction of held-out points\n")
    print("`rmse` is of the expected curve (`Fit.predict`), `curve` of the estimates.\n")
    head = ["series", "fit until", "R0", "skip", "held out", "rmse", "curve", "in band"]
    rows = []
    limits = {"scalerl_8b_bs768_14k+": 8e3, "scalerl_bs512+": 8e3, "scalerl_bs2048+": 5e4}
    for name, limit in limits.items():
        for r0 in (0.39, 0.395, 0.40):
            for skip in (None, SKIP):
                f = fit(data[name], r0=r0, skip=skip, fit_until=limit)
                p = f.prediction
                assert p is not None
                how = f"automatic ({int(f.window.skipped.sum())})" if skip is None else f"{skip:g}"
                errors = [f"{p.rmse:.4f}", f"{p.rmse_curve:.4f}", f"{p.coverage:.0%}"]
                rows.append([name, f"{limit:g}", f"{r0:g}", how, str(p.points), *errors])
    table(head, rows)
    print(
        "bs512 up to 5.5k hours (its published fit window) is ill-conditioned: "
        f"A {fit(data['scalerl_bs512+'], r0=R0, skip=SKIP, fit_until=5500.0).A:.3f}."
    )


if __name__ == "__main__":
    main()
