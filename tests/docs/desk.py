"""The folder in which the documents' commands run."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.metrics.metrics_file import MetricsWriter
from tests.docs.commands import ROOT

LINKS = (
    *("benchmarks", "constraints.txt", "docker", "docs", "examples", "patches", "scripts", "tools"),
)


def lay_out(folder: Path) -> Path:
    """Make `runs/*`, `points.csv` and the configurations that the documents speak of."""
    for name in LINKS:
        (folder / name).symlink_to(ROOT / name)
    for name, shift in (("mine", 0.0), ("other", 0.05)):
        (folder / "runs" / name).mkdir(parents=True)
        _metrics(folder / "runs" / name / "metrics.jsonl", shift)
    (folder / "points.csv").write_text(
        "gpu_hours,pass_rate\n"
        + "".join(f"{c},{_rate(c, 0.0, 2000):.4f}\n" for c in range(500, 16_001, 500))
    )
    tiny = (ROOT / "examples" / "scalerl_tiny.yaml").read_text()
    for name in ("my_run.yaml", "my_sizes.yaml"):
        (folder / name).write_text(tiny)
    return folder


def _rate(compute: float, shift: float, mid: float) -> float:
    return 0.395 + (0.7 + shift - 0.395) / (1 + (mid / max(compute, 1e-9)) ** 1.1)


def _metrics(path: Path, shift: float) -> None:
    """A finished run, as the orchestrator writes it."""
    with MetricsWriter(path) as writer:
        for step in range(0, 401, 25):
            compute = 10_000.0 * step
            writer.eval(
                {
                    "step": step,
                    "compute_tokens": compute,
                    "compute_flops": compute * 1e6,
                    "compute_device_hours": compute / 1e3,
                    "wall_seconds": step * 2.0,
                    "pass_rate": _rate(compute, shift, 1e6),
                    "pass_rate_stderr": 0.008,
                }
            )
