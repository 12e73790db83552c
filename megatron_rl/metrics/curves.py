"""The fits of a run: its evaluations as a whole, and those of each task."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.metrics.metrics_file import Row

if TYPE_CHECKING:
    from megatron_rl.scaling import Fit

UNITS = {
    "tokens": "tokens",
    "device_hours": "device hours",
    "flops": "FLOP",
    "steps": "optimizer steps",
}
PARAMETERS = ("A", "B", "Cmid", "R0")


def fit_run(evaluations: list[Row], fit_compute: str, picture: Path) -> dict[str, Any]:
    """The `fit` entry of the summary; writes the picture where there is a fit."""
    from megatron_rl.scaling.plot import save_plot

    found, curve = fit_curve(evaluations, fit_compute)
    if curve is None:
        return found
    picture.parent.mkdir(parents=True, exist_ok=True)
    save_plot(curve, picture)
    return found | {"picture": picture.name}


def fit_tasks(evaluations: list[Row], fit_compute: str, picture: Path) -> dict[str, Any]:
    """The `tasks` entry of the summary: {task: {pass_rate, fit}}; empty for a run of one task.

    The picture has one panel for each task that could be fitted.
    """
    from megatron_rl.scaling.plot import save_panels

    found: dict[str, Any] = {}
    curves: list[Fit] = []
    for task in dict.fromkeys(name for row in evaluations for name in row.get("tasks") or {}):
        rows = [row | row["tasks"][task] for row in evaluations if task in (row.get("tasks") or {})]
        fitted, curve = fit_curve(rows, fit_compute, name=task)
        found[task] = {"pass_rate": ends(rows), "fit": fitted}
        if curve is not None:
            curves.append(curve)
            fitted["picture"] = picture.name
    if curves:
        picture.parent.mkdir(parents=True, exist_ok=True)
        save_panels(curves, picture)
    return found


def fit_curve(
    evaluations: list[Row], fit_compute: str, name: str = ""
) -> tuple[dict[str, Any], Fit | None]:
    """Parameters of the fit of these rows, or why there is none; and the fit itself."""
    from megatron_rl.scaling import fit

    axis = "step" if fit_compute == "steps" else f"compute_{fit_compute}"
    used = [
        row for row in evaluations if row.get(axis) is not None and row.get("pass_rate") is not None
    ]
    found: dict[str, Any] = {"compute": fit_compute, "points": len(used)}
    try:
        curve = fit(
            [row[axis] for row in used],
            [row["pass_rate"] for row in used],
            stderr=_stderrs(used),
            r0="first",
            unit=UNITS.get(fit_compute, fit_compute),
            name=name,
        )
    # The fitter's refusal (too few points, bad data) and scipy's failures; not the run's.
    except (ValueError, ArithmeticError, RuntimeError) as e:
        return found | {"error": f"{type(e).__name__}: {e}"}, None
    for parameter in PARAMETERS:
        interval = getattr(curve, parameter)
        found[parameter] = {
            key: _number(getattr(interval, key)) for key in ("value", "low", "high")
        }
    found["well_conditioned"] = bool(curve.well_conditioned)
    found["warnings"] = [str(warning) for warning in curve.warnings]
    return found, curve


def ends(evaluations: list[Row]) -> dict[str, Any]:
    """First and last pass rate: {first, last}, each {step, value, stderr} or None."""
    return {"first": _point(evaluations[:1]), "last": _point(evaluations[-1:])}


def _point(rows: list[Row]) -> dict[str, Any] | None:
    for row in rows:
        return {
            "step": row["step"],
            "value": row.get("pass_rate"),
            "stderr": row.get("pass_rate_stderr"),
        }
    return None


def _stderrs(rows: list[Row]) -> list[float] | None:
    """Standard errors for the fit, None if some are unknown.

    A pass rate of 0 or 1 has a sampling error of 0, which would give that point all the weight:
    the smallest of the others stands in.
    """
    values = [row.get("pass_rate_stderr") for row in rows]
    known = [value for value in values if value is not None]
    positive = [value for value in known if value > 0]
    if len(known) < len(values) or not positive:
        return None
    return [max(value, min(positive)) for value in known]


def _number(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
