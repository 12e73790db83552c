"""The seven-point table of five methods, ranked by `compare`.

python benchmarks/scaling/heatmap.py > benchmarks/results/scaling_heatmap.md
"""

from common import MADE, table

from megatron_rl.scaling import Series, compare, fit

HOURS = [5e3, 1e4, 2e4, 4e4, 6e4, 8e4, 1e5]
METHODS = {
    "ScaleRL": [0.25, 0.35, 0.44, 0.52, 0.57, 0.60, 0.61],
    "MiniMax": [0.23, 0.33, 0.42, 0.49, 0.54, 0.57, 0.58],
    "DAPO": [0.21, 0.30, 0.39, 0.46, 0.51, 0.53, 0.54],
    "GRPO": [0.19, 0.28, 0.36, 0.43, 0.48, 0.51, 0.52],
    "Magistral": [0.17, 0.26, 0.34, 0.40, 0.45, 0.48, 0.49],
}


def main() -> None:
    print(f"# Seven-point table of five methods\n\n{MADE}\n")
    print("Ranked by A; where A agrees within 0.02, by B at the shared A.\n")
    for r0 in (0.0, 0.1, "fit"):
        fits = [
            fit(Series.clean(HOURS, y, name=name, unit="GPU-hours"), r0=r0)
            for name, y in METHODS.items()
        ]
        result = compare(fits)
        right = [e.fit.name for e in result.entries] == list(METHODS)
        print(f"R0 {r0}: order {'as printed' if right else 'NOT as printed'}\n")
        rows = []
        for e in result.entries:
            at = "-"
            if e.shared is not None:
                at = f"{e.shared.B:.2f} at {e.shared.A.value:.3f}"
            row = [str(e.rank), e.fit.name, f"{e.fit.A:.3f}", f"{e.fit.B:.2f}", at]
            rows.append([*row, f"{e.fit.Cmid:amount}"])
        table(["rank", "method", "A", "B", "B at shared A", "Cmid"], rows)


if __name__ == "__main__":
    main()
