"""What an ablation found: fits of runs and of recipes, and the recipes against each other.

comparison.json, schema `megatron_rl.ablation/1`:

    schema, compute          the schema's name; the measure of compute on the axis
    recipes                  by name: {runs, first, last: mean pass rates, fit}, where `fit` is of
                             all seeds' evaluations together (megatron_rl.fit/1) or {error}
    runs                     by `recipe/seed-n`: {ended, steps, tokens, minutes, first, last, fit}
    comparison               megatron_rl.comparison/1 of the recipes, or {error}
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.commands.ablate.runs import Run
from megatron_rl.metrics.metrics_file import Row, last_rows

SCHEMA = "megatron_rl.ablation/1"
UNITS = {"tokens": "tokens", "device_hours": "device hours", "flops": "FLOP", "steps": "steps"}


@dataclass(frozen=True, slots=True)
class Curve:
    """Evaluations, and the sigmoid through them."""

    rows: list[Row]
    fit: Any
    """`scaling.Fit`, or None."""
    error: str
    """Why there is no fit; empty when there is one."""

    @property
    def first(self) -> float | None:
        """Mean pass rate at step 0."""
        return _mean([r["pass_rate"] for r in self.rows if r["step"] == 0])

    def described(self) -> dict[str, Any]:
        """The fit for JSON."""
        from megatron_rl.scaling.report import fit_to_dict

        return {"error": self.error} if self.fit is None else fit_to_dict(self.fit)


def write(runs: list[Run], folder: Path) -> dict[str, Any]:
    """Fit these runs and write comparison.json, .md and .png (where two recipes have fits).

    Returns:
        What comparison.json holds.
    """
    from megatron_rl.scaling import DataError, compare
    from megatron_rl.scaling.plot import save_comparison
    from megatron_rl.scaling.report import comparison_to_dict

    measure = runs[0].load().fit.compute
    single = {run: curve([run], measure, run.name) for run in runs}
    recipes = {
        name: curve([run for run in runs if run.recipe == name], measure, name)
        for name in dict.fromkeys(run.recipe for run in runs)
    }
    fits = [c.fit for c in recipes.values() if c.fit is not None]
    comparison: dict[str, Any]
    try:
        ranked = compare(fits)
        comparison = comparison_to_dict(ranked)
        save_comparison(ranked, folder / "comparison.png")
    except DataError as e:
        comparison = {"error": str(e)}
    found = {
        "schema": SCHEMA,
        "compute": measure,
        "recipes": {
            name: {
                "runs": sum(run.recipe == name for run in runs),
                "first": c.first,
                "last": _mean([_last(single[r].rows) for r in runs if r.recipe == name]),
                "fit": c.described(),
            }
            for name, c in recipes.items()
        },
        "runs": {run.name: _run(run, single[run]) for run in runs},
        "comparison": comparison,
    }
    _replace(folder / "comparison.json", json.dumps(found, indent=2, allow_nan=False) + "\n")
    _replace(folder / "comparison.md", table(found))
    return found


def curve(runs: list[Run], measure: str, name: str) -> Curve:
    """The evaluations of these runs together, and their fit; a fit that fails is told."""
    from megatron_rl.scaling import Series, fit

    axis = "step" if measure == "steps" else f"compute_{measure}"
    rows = [row for run in runs for row in last_rows(run.rows(), "eval")]
    try:
        series = Series.clean(
            [row[axis] for row in rows],
            [row["pass_rate"] for row in rows],
            [row["pass_rate_stderr"] for row in rows],
            name=name,
            unit=UNITS[measure],
        )
        return Curve(rows, fit(series, r0="first"), "")
    # The fitter's refusal (too few points) and scipy's failures: the runs stay what they are.
    except (ValueError, ArithmeticError, RuntimeError) as e:
        return Curve(rows, None, f"{type(e).__name__}: {e}")


def table(found: dict[str, Any]) -> str:
    """The comparison as Markdown."""
    unit = UNITS[found["compute"]]
    ranked = {run["name"]: run for run in found["comparison"].get("runs", [])}
    order = [*ranked, *(name for name in found["recipes"] if name not in ranked)]
    lines = [
        f"| recipe | runs | pass rate, first -> last | A | B | Cmid [{unit}] | B at shared A |"
        " fit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in order:
        entry = found["recipes"][name]
        fit, shared = entry["fit"], ranked.get(name, {}).get("at_shared_a")
        at = f"{_interval(shared['B'], '.2f')} at {shared['A']:.3f}" if shared else "-"
        lines.append(
            f"| {name} | {entry['runs']} | {_number(entry['first'])} -> {_number(entry['last'])} |"
            f" {_parameters(fit)} | {at} | {_judged(fit)} |"
        )
    lines += [
        "",
        f"| run | ended by | steps | tokens | minutes | pass rate, first -> last | A | B |"
        f" Cmid [{unit}] |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in found["runs"].items():
        lines.append(
            f"| {name} | {run['ended']} | {run['steps']} | {run['tokens']:,.0f} |"
            f" {run['minutes']:.1f} | {_number(run['first'])} -> {_number(run['last'])} |"
            f" {_parameters(run['fit'])} |"
        )
    pairs = found["comparison"].get("pairs", [])
    lines += ["", *(f"- {p['better']} over {p['other']}: {p['verdict']}" for p in pairs)]
    return "\n".join(lines).rstrip() + "\n"


def _run(run: Run, c: Curve) -> dict[str, Any]:
    steps = last_rows(run.rows(), "step")
    last = steps[-1] if steps else {}
    return {
        "ended": run.done(),
        "steps": len(steps),
        "tokens": last.get("compute_tokens", 0),
        "minutes": last.get("wall_seconds", 0.0) / 60,
        "first": c.first,
        "last": _last(c.rows),
        "fit": c.described(),
    }


def _last(rows: list[Row]) -> float | None:
    return rows[-1]["pass_rate"] if rows else None


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def _parameters(fit: dict[str, Any]) -> str:
    if "error" in fit:
        return "- | - | -"
    forms = (("A", ".3f"), ("B", ".2f"), ("Cmid", ",.0f"))
    return " | ".join(_interval(fit[name], form) for name, form in forms)


def _judged(fit: dict[str, Any]) -> str:
    if "error" in fit:
        return fit["error"].replace("|", "/").replace("\n", " ")
    return "good" if fit["well_conditioned"] else "ill-conditioned"


def _interval(value: dict[str, Any], form: str) -> str:
    low, high = (_number(value[end], form) for end in ("low", "high"))
    return f"{_number(value['value'], form)} [{low}, {high}]"


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else f"{value:{form}}"


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    os.replace(fresh, path)
