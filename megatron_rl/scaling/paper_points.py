"""Published points and Table 1 of arXiv 2510.13786, which plots can show and tests fit.

`published_points.csv` was read off the figures (errors: 3 GPU-hours, .0003); its series `X_ext` are
the markers beyond the fit of X. Table 1 prints no R0: a curve takes the one that fits its points.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from .curve import log_sigmoid
from .errors import PointsError
from .fit_result import amount
from .series import Series

POINTS, TABLE = (Path(__file__).with_name(f"published_{n}.csv") for n in ("points", "table"))


@dataclass(frozen=True, slots=True)
class PaperRun:
    """A run of the paper."""

    name: str
    points: Series
    parameters: dict[str, float] | None
    """A, B, Cmid and R0, the keywords of `log_sigmoid`; None if Table 1 has no such run."""

    def __str__(self) -> str:
        if (p := self.parameters) is None:
            return f"{self.name} (published)"
        return f"{self.name} (A {p['A']:.3f}, B {p['B']:.2f}, Cmid {amount(p['Cmid'])})"


def published_series() -> dict[str, Series]:
    """Return the series of points by name; `X+` is X joined with `X_ext`."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in _rows(POINTS):
        pair = float(row["gpu_hours"]), float(row["pass_rate"])
        for name in {row["series"], row["series"].removesuffix("_ext") + "+"}:
            points.setdefault(name, []).append(pair)
    joined = {f"{n.removesuffix('_ext')}+" for n in points if n.endswith("_ext")}
    return {
        name: Series.clean(*zip(*pairs, strict=True), name=name, unit="GPU-hours")
        for name, pairs in points.items()
        if name in joined or not name.endswith("+")
    }


def published_table() -> dict[str, dict[str, str]]:
    """Return Table 1: run -> `series` (empty without points), `Cmid` [GPU-hours], `B`, `A`."""
    return {row["run"]: row for row in _rows(TABLE)}


def _rows(path: Path) -> list[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if line[0] != "#"))


def published(name: str, unit: str = "GPU-hours") -> PaperRun:
    """Return a run by its name in Table 1 or its series of points, to draw in a unit of compute.

    Raises:
        PointsError: no such run, no points of it, or a unit that is no device time.
    """
    series, table = published_series(), published_table()
    key = table[name]["series"] if name in table else name
    if key not in series:
        names = [n for n, r in table.items() if r["series"]]
        names += [n for n in series if not n.endswith(("_ext", "+"))]
        raise PointsError(f"no published points '{name}'", f"There are: {', '.join(names)}")
    if unit not in ("GPU-hours", "device-hours"):
        problem = f"published points are in GPU-hours, the fit is in {unit}"
        raise PointsError(problem, "Choose --compute-column train_device_hours")
    points = series.get(f"{key}+", series[key])
    row = next((r for r in table.values() if r["series"] == key), None)
    if row is None:
        return PaperRun(name, points, None)
    shape = {k: float(row[k]) for k in ("A", "B", "Cmid")}
    g = log_sigmoid(points.compute, **shape | {"A": 1.0}, R0=0.0)
    r0 = float((1 - g) @ (points.reward - shape["A"] * g) / ((1 - g) @ (1 - g)))
    return PaperRun(name, points, shape | {"R0": r0})
