"""The fits of a run: over all held-out prompts, and for each task and evaluation set."""

from typing import TYPE_CHECKING, Any

from megatron_rl.metrics.metrics_file import Row, last_rows

if TYPE_CHECKING:
    from megatron_rl.scaling import Fit

UNITS = {"tokens": "tokens", "device_hours": "device hours", "flops": "FLOP"}
UNITS |= {f"train_{name}": f"training {unit}" for name, unit in UNITS.items()}
UNITS["steps"] = "optimizer steps"


def parts_of(rows: list[Row], key: str) -> dict[str, list[Row]]:
    """Return name -> evaluations by step, of the `tasks` or `sets` (`key`) of a run's rows.

    Those over all held-out prompts, `fit`, have the name "".
    """
    if key == "fit":
        return {"": last_rows(rows, "eval")}
    by_name: dict[str, dict[int, Row]] = {}
    for row in rows:
        parts = row.get(key) if row["kind"] in ("eval", "sets") else None
        for name, part in (parts or {}).items():
            by_name.setdefault(name, {})[row["step"]] = row | part
    return {name: [rows[step] for step in sorted(rows)] for name, rows in by_name.items()}


def fit_parts(
    rows: list[Row], key: str, fit_compute: str
) -> tuple[dict[str, Any], dict[str, "Fit"]]:
    """Return {name: {pass_rate, fit}} of a key of `parts_of`, and the fits by name.

    A name without enough evaluations has no fit.
    """
    entries, curves = dict[str, Any](), dict[str, "Fit"]()
    for name, evaluations in parts_of(rows, key).items():
        fitted, curve = fit_curve(evaluations, fit_compute, name=name)
        entries[name] = {"pass_rate": ends(evaluations), "fit": fitted}
        if curve is not None:
            curves[name] = curve
            fitted["picture"] = "fit.png" if key == "fit" else f"fit_{key}.png"
    return entries, curves


def fit_curve(
    evaluations: list[Row], fit_compute: str, name: str = ""
) -> tuple[dict[str, Any], "Fit | None"]:
    """Return the summary entry of a fit (its parameters, or `error`), and the fit or None."""
    from megatron_rl.scaling import fit
    from megatron_rl.scaling.report import plain

    used, c, r = points_of(evaluations, fit_compute)
    entry: dict[str, Any] = {"compute": fit_compute, "points": len(used)}
    try:
        curve = fit(c, r, _stderrs(used), unit=UNITS.get(fit_compute, fit_compute), name=name)
    # Too few points, bad data or a failure of scipy: the run itself has succeeded.
    except (ValueError, ArithmeticError, RuntimeError) as e:
        return entry | {"error": f"{type(e).__name__}: {e}"}, None
    for parameter in ("A", "B", "Cmid", "R0"):
        interval = plain(getattr(curve, parameter))
        entry[parameter] = {key: interval[key] for key in ("value", "low", "high")}
    entry["well_conditioned"] = bool(curve.well_conditioned)
    entry["warnings"] = [warning.text for warning in curve.warnings]
    return entry, curve


def points_of(
    evaluations: list[Row], fit_compute: str
) -> tuple[list[Row], list[float], list[float]]:
    """Return the evaluations with both, their compute (a value of `fit.compute`) and pass rate."""
    axis = "step" if fit_compute == "steps" else f"compute_{fit_compute}"
    used = [row for row in evaluations if None not in (row.get(axis), row.get("pass_rate"))]
    return used, [row[axis] for row in used], [row["pass_rate"] for row in used]


def ends(evaluations: list[Row]) -> dict[str, Any]:
    """Return the first and last pass rate, each {step, value, stderr, entropy}, or None."""
    names = {"step": "step", "value": "pass_rate", "stderr": "pass_rate_stderr",
             "entropy": "eval_entropy"}  # fmt: skip
    points = [{key: row.get(name) for key, name in names.items()} for row in evaluations]
    return {"first": points[0] if points else None, "last": points[-1] if points else None}


def _stderrs(rows: list[Row]) -> list[float] | None:
    # A zero (of a pass rate of 0 or 1) would give its point all the weight: it is replaced by the
    # smallest of the others.
    values = [row.get("pass_rate_stderr") for row in rows]
    least = min((value for value in values if value and value > 0), default=None)
    return None if None in values or least is None else [max(value, least) for value in values]
