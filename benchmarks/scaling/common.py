"""Shared by the scaling benchmarks: the published points and synthetic runs."""

import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import processor  # noqa: E402
from megatron_rl.scaling import Series, log_sigmoid  # noqa: E402
from megatron_rl.scaling.paper_points import published_series  # noqa: E402
from megatron_rl.scaling.series import covariance  # noqa: E402

MADE = f"`python benchmarks/scaling/{Path(sys.argv[0]).name}`, {date.today()}, {processor()}."
"""Command, date and processor, below the title of a result."""
SIGMA = 0.0045
"""Noise of the published evaluations (median of their fits)."""


def published() -> dict[str, Series]:
    """Return the published series by name; `X+` joins a series with its extrapolation markers."""
    return {n: s for n, s in published_series().items() if not n.endswith("_ext")}


def synthetic(
    seed: int, draws: int, share: float, length: float = 2.0, sigma: float = SIGMA
) -> Iterator[tuple[dict[str, float], np.ndarray, np.ndarray]]:
    """Yield runs of 20-30 evaluations with A .45-.75, B 1-5 (log-uniform), up to 2 to 4 Cmid.

    `share` of the noise variance is correlated over `length` evaluations (0: independent).
    """
    rng = np.random.default_rng(seed)
    for _ in range(draws):
        truth = {
            "A": rng.uniform(0.45, 0.75),
            "B": float(np.exp(rng.uniform(0, np.log(5)))),
            "Cmid": float(np.exp(rng.uniform(np.log(1e3), np.log(2e4)))),
            "R0": rng.uniform(0.1, 0.4),
        }
        n = int(rng.integers(20, 31))
        c = np.linspace(0.3, rng.uniform(2, 4), n) * truth["Cmid"]
        noise = np.linalg.cholesky(covariance(c, share, length=length)) @ rng.normal(size=n)
        yield truth, c, np.clip(log_sigmoid(c, **truth) + sigma * noise, 0, 1)


def table(head: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)
