"""Fits of a study's runs, and their comparison, next to the published ones.

comparison.json, schema `megatron_rl.study/1`:

    compute        measure of compute on the axis
    results        by group (its seeds together) and by run `group/seed-n`:
                   {runs, ended, steps, tokens, minutes: totals, first, last: mean pass rates,
                   fit: as in the summary.json of a run; paper: published result, of groups}
    seeds          by group of several fitted runs: {A: of each, spread: largest distance from
                   their mean}
    margin         differences of A up to this count as none: the largest spread, at least 0.02
    comparison     megatron_rl.comparison/1 of the groups, or {error}
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.commands.study.runs import Run
from megatron_rl.metrics.curves import UNITS, fit_curve

SCHEMA = "megatron_rl.study/1"
COLUMNS = "recipe or run | runs | ended by | steps | tokens | minutes | pass rate | A | B"
FORMS = {"A": ".3f", "B": ".2f", "Cmid": ",.0f"}


def write(runs: list[Run], folder: Path, shared_a: Any = None) -> dict[str, Any]:
    """Fit these runs; write comparison.json (returned), .md and, of two or more fits, .png.

    All are ranked by B at `shared_a`, a number or `mean`. Over device hours, the picture has the
    published points of the groups.
    """
    from megatron_rl.scaling import PointsError, compare
    from megatron_rl.scaling.comparison import MARGIN
    from megatron_rl.scaling.paper_points import published
    from megatron_rl.scaling.plot import save_comparison
    from megatron_rl.scaling.report import comparison_to_dict

    measure = runs[0].config.fit.compute
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    fitted = {name: _fit(name, members, measure) for name, members in groups.items()}
    curves = [curve for _, curve in fitted.values() if curve is not None]
    fitted |= {run.name: _fit(run.name, [run], measure) for run in runs}
    seeds, overlay = {}, []
    for name, members in groups.items():
        entry, of_seeds = members[0].entry, [fitted[run.name][1] for run in members]
        fitted[name][0]["paper"] = entry.get("paper")
        if entry.get("published") and measure.endswith("device_hours"):
            overlay.append(published(entry["published"]))
        values = [curve.A.value for curve in of_seeds if curve is not None]
        if len(values) > 1:
            seeds[name] = {"A": values, "spread": max(abs(a - fmean(values)) for a in values)}
    margin = max([MARGIN, *(each["spread"] for each in seeds.values())])
    try:
        comparison = compare(curves, margin, shared_a)
        ranking = comparison_to_dict(comparison)
        save_comparison(comparison, folder / "comparison.png", overlay)
    except PointsError as e:
        ranking = {"error": str(e)}
    results = {
        "schema": SCHEMA,
        "compute": measure,
        "results": {name: result for name, (result, _) in fitted.items()},
        "seeds": seeds,
        "margin": margin,
        "comparison": ranking,
    }
    (folder / "comparison.json").write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
    (folder / "comparison.md").write_text(table(results))
    return results


def _fit(name: str, runs: list[Run], measure: str) -> tuple[dict[str, Any], Any]:
    """Return the result of these runs together, and the fit or None."""
    steps = [rows[-1] for run in runs if (rows := run.rows())]
    evaluations = [rows for run in runs if (rows := run.rows("eval"))]
    fit, curve = fit_curve([row for rows in evaluations for row in rows], measure, name=name)
    result = {
        "runs": len(runs),
        "ended": ", ".join(dict.fromkeys(run.ended_by() or "not yet" for run in runs)),
        "steps": sum(row["step"] + 1 for row in steps),
        "tokens": sum(row["compute_tokens"] for row in steps),
        "minutes": sum(row["wall_seconds"] for row in steps) / 60,
        "first": fmean(rows[0]["pass_rate"] for rows in evaluations) if evaluations else None,
        "last": fmean(rows[-1]["pass_rate"] for rows in evaluations) if evaluations else None,
        "fit": fit,
    }
    return result, curve


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown: a table of groups and runs, the margin and the ranking.

    The published result of a group is the row below its own.
    """
    ranked = {run["name"]: run["at_shared_a"] for run in results["comparison"].get("runs", [])}
    head = f"{COLUMNS} | Cmid [{UNITS[results['compute']]}] | B at the shared A | fit"
    lines = [f"| {head} |", "|---" * 12 + "|"]
    for name, r in results["results"].items():
        rates = " -> ".join("-" if r[k] is None else f"{r[k]:.3f}" for k in ("first", "last"))
        curve = [_interval(r["fit"].get(key), form) for key, form in FORMS.items()]
        good = "good" if r["fit"].get("well_conditioned") else "ill-conditioned"
        verdict = r["fit"].get("error", good).replace("|", "/").replace("\n", " ")
        numbers = [r["runs"], r["ended"], r["steps"], f"{r['tokens']:,.0f}", f"{r['minutes']:.1f}"]
        at = "-"
        if shared := ranked.get(name):
            at = f"{_interval(shared['B'], '.2f')} at {shared['A']:.3f}"
        lines.append(f"| {' | '.join(map(str, [name, *numbers, rates, *curve, at, verdict]))} |")
        if paper := r.get("paper"):
            forms = FORMS | {"B_at_shared_A": ".2f"}
            cells = [f"{paper[key]:{form}}" if key in paper else "-" for key, form in forms.items()]
            cells = [f"{name}, published", *"-" * 6, *cells, "GPU-hours"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Margin of A: {results['margin']:.3f}"]
    for name, seeds in results["seeds"].items():
        values = ", ".join(f"{a:.3f}" for a in seeds["A"])
        lines.append(f"- {name}: A {values}, within {seeds['spread']:.3f} of their mean")
    for pair in results["comparison"].get("pairs", []):
        lines.append(f"- {pair['better']} over {pair['other']}: {pair['verdict']}")
    return "\n".join(lines) + "\n"


def _interval(value: dict[str, Any] | None, form: str) -> str:
    if value is None:
        return "-"
    keys = ("value", "low", "high")
    estimate, low, high = ("-" if value[k] is None else f"{value[k]:{form}}" for k in keys)
    return f"{estimate} [{low}, {high}]"
