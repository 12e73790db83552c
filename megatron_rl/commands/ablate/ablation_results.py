"""Fits of recipes and runs, and the comparison of the recipes, as JSON, table and picture.

comparison.json, schema `megatron_rl.ablation/2`:

    compute        measure of compute on the axis
    results        by recipe (its runs together) and by run `recipe/seed-n`:
                   {runs, ended, steps, tokens, minutes: totals, first, last: mean pass rates,
                   fit: as in the summary.json of a run}
    comparison     megatron_rl.comparison/1 of the recipes, or {error}
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.commands.ablate.runs import Run
from megatron_rl.metrics.curves import UNITS, fit_curve
from megatron_rl.metrics.metrics_file import last_rows

SCHEMA = "megatron_rl.ablation/2"


def write(runs: list[Run], folder: Path) -> dict[str, Any]:
    """Fit these runs; write comparison.json (returned), .md and, of two or more fits, .png."""
    from megatron_rl.scaling import PointsError, compare
    from megatron_rl.scaling.plot import save_comparison
    from megatron_rl.scaling.report import comparison_to_dict

    measure = runs[0].config.fit.compute
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(str(run.config.recipe), []).append(run)
    fitted = {name: _fit(name, members, measure) for name, members in groups.items()}
    try:
        comparison = compare([curve for _, curve in fitted.values() if curve is not None])
        ranking = comparison_to_dict(comparison)
        save_comparison(comparison, folder / "comparison.png")
    except PointsError as e:
        ranking = {"error": str(e)}
    fitted |= {run.name: _fit(run.name, [run], measure) for run in runs}
    results = {
        "schema": SCHEMA,
        "compute": measure,
        "results": {name: result for name, (result, _) in fitted.items()},
        "comparison": ranking,
    }
    (folder / "comparison.json").write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
    (folder / "comparison.md").write_text(table(results))
    return results


def _fit(name: str, runs: list[Run], measure: str) -> tuple[dict[str, Any], Any]:
    """Return the result of these runs together, and the fit or None."""
    steps = [rows[-1] for run in runs if (rows := last_rows(run.rows(), "step"))]
    evaluations = [rows for run in runs if (rows := last_rows(run.rows(), "eval"))]
    fit, curve = fit_curve([row for rows in evaluations for row in rows], measure, name=name)
    result = {
        "runs": len(runs),
        "ended": ", ".join(dict.fromkeys(str(run.ended_by()) for run in runs)),
        "steps": sum(row["step"] + 1 for row in steps),
        "tokens": sum(row["compute_tokens"] for row in steps),
        "minutes": sum(row["wall_seconds"] for row in steps) / 60,
        "first": fmean(rows[0]["pass_rate"] for rows in evaluations) if evaluations else None,
        "last": fmean(rows[-1]["pass_rate"] for rows in evaluations) if evaluations else None,
        "fit": fit,
    }
    return result, curve


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown: a table of recipes and runs, and the ranking."""
    columns = "recipe or run | runs | ended by | steps | tokens | minutes | pass rate | A | B"
    lines = [f"| {columns} | Cmid [{UNITS[results['compute']]}] | fit |", "|---" * 11 + "|"]
    for name, r in results["results"].items():
        rates = " -> ".join("-" if r[k] is None else f"{r[k]:.3f}" for k in ("first", "last"))
        forms = {"A": ".3f", "B": ".2f", "Cmid": ",.0f"}
        curve = [_interval(r["fit"].get(key), form) for key, form in forms.items()]
        good = "good" if r["fit"].get("well_conditioned") else "ill-conditioned"
        verdict = r["fit"].get("error", good).replace("|", "/").replace("\n", " ")
        numbers = [r["runs"], r["ended"], r["steps"], f"{r['tokens']:,.0f}", f"{r['minutes']:.1f}"]
        lines.append(f"| {' | '.join(map(str, [name, *numbers, rates, *curve, verdict]))} |")
    lines.append("")
    for run in results["comparison"].get("runs", []):
        if shared := run["at_shared_a"]:
            at = f"B {_interval(shared['B'], '.2f')} at the shared A {shared['A']:.3f}"
            lines.append(f"- {run['name']}: {at}")
    for pair in results["comparison"].get("pairs", []):
        lines.append(f"- {pair['better']} over {pair['other']}: {pair['verdict']}")
    return "\n".join(lines).rstrip() + "\n"


def _interval(value: dict[str, Any] | None, form: str) -> str:
    if value is None:
        return "-"
    keys = ("value", "low", "high")
    estimate, low, high = ("-" if value[k] is None else f"{value[k]:{form}}" for k in keys)
    return f"{estimate} [{low}, {high}]"
