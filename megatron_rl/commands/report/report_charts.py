"""The charts of the page, as data for its script (report.js).

A chart has a `title`, a `unit`, a `log` axis or not, `notes`, `guides` (lines at a value), `marks`
(events at a step) and `lines`. A line has a `name`, a `color` (number of a run or metric, or
`ink`), a `kind` (`line`, `dash`, `dots` or `band`), and `x` and `y`, or `x`, `low` and `high`.
"""

from importlib import resources
from typing import Any

import numpy as np
import yaml

from megatron_rl.commands.report.run_facts import RunFacts
from megatron_rl.metrics.curves import UNITS, axis_of, parts_of
from megatron_rl.metrics.metrics_file import METRICS, Row, last_rows

Chart = dict[str, Any]
MOST_POINTS = 400  # of a line: of more, neighbors are joined
MOST_MARKS = 60
CHARTS: dict[str, dict[str, list[str]]] = yaml.safe_load(
    (resources.files(__package__) / "charts.yaml").read_text()
)
"""Section -> title -> metrics."""
MARKED = ("generator_lost", "resumed", "prompt_failed")


def charts_of(section: str, runs: list[RunFacts]) -> list[Chart]:
    """Return the charts of a section that have a value."""
    charts = []
    for title, names in CHARTS[section].items():
        if len(runs) == 1:
            charts.append(_chart(title, names, runs))
        else:
            charts += [_chart(f"{title}: {_plain(name)}", [name], runs) for name in names]
    return [chart for chart in charts if chart["lines"]]


def _chart(title: str, names: list[str], runs: list[RunFacts]) -> Chart:
    lines, notes, units = list[Any](), list[str](), set[str]()
    size = 1
    for i, (run, name) in enumerate((run, name) for run in runs for name in names):
        x, y = measured(run.rows, name)
        if not len(x):
            continue
        x, y, low, high, joined = thinned(x, y)
        size = max(size, joined)
        label = _plain(name) if len(runs) == 1 else run.name
        if joined > 1:
            lines.append({"color": i, "kind": "band", "x": x, "low": low, "high": high})
        lines.append({"name": label, "color": i, "kind": "line", "x": x, "y": y})
        about, unit = meaning(name)
        units.add(unit)
        if about not in notes:
            notes.append(about)
    if size > 1:
        notes.append(f"Each point is the mean of up to {size} steps; the band is their range.")
    marks = [] if len(runs) > 1 else marks_of(runs[0])
    unit = units.pop() if len(units) == 1 else ""
    return {"title": title, "unit": unit, "axis": "optimizer step", "log": False, "notes": notes,
            "lines": lines, "marks": marks, "guides": []}  # fmt: skip


def measured(rows: list[Row], name: str) -> tuple[Any, Any]:
    """Return steps and values of a metric, or of a quotient of two; both empty if it has none."""
    top, _, bottom = name.partition("/")
    for kind in ("step", "eval"):
        points = []
        for row in last_rows(rows, kind):
            value, over = row.get(top), row.get(bottom) if bottom else 1
            if value is not None and over:
                points.append((row["step"], value / over))
        if points:
            x, y = np.array(points, float).T
            return x, y
    return np.empty(0), np.empty(0)


def thinned(x: Any, y: Any) -> tuple[Any, Any, Any, Any, int]:
    """Return x and the mean, least and greatest y of groups of neighbors, and their size."""
    size = max(1, -(-len(x) // MOST_POINTS))
    starts = np.arange(0, len(x), size)
    counts = np.diff([*starts, len(x)])
    middle, mean = (np.add.reduceat(values, starts) / counts for values in (x, y))
    return middle, mean, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts), size


def meaning(name: str) -> tuple[str, str]:
    """Return the explanation of a metric as one line, and its unit."""
    top, _, bottom = name.partition("/")
    text, _, unit = METRICS[top].strip().removesuffix("]").rpartition(" [")
    if bottom:
        return f"{_plain(name)}: {text}, as a share of {bottom}", "fraction"
    unit = "fraction" if unit.startswith("fraction") else unit
    return f"{name}: {METRICS[name].strip()}", "" if unit in ("1", "norm", "ratio") else unit


def _plain(name: str) -> str:
    return name.replace("/", " / ")


def marks_of(run: RunFacts) -> list[list[Any]]:
    """Return (step, text) of the newest events that a chart marks."""
    events = [row for row in run.rows if row.get("event") in MARKED]
    return [
        [row["step"], f"{row['event']} {row.get('generator', '')}"] for row in events[-MOST_MARKS:]
    ]


def pass_rate_charts(runs: list[RunFacts]) -> list[tuple[Chart, list[str]]]:
    """Return the charts of held-out prompts, of each task and of each set, with their words."""
    from megatron_rl.scaling.plot import title as title_of

    parts = [("fit", "", "Held-out pass rate")]
    for key, what in (("tasks", "task"), ("sets", "evaluation set")):
        names = dict.fromkeys(name for run in runs for name in parts_of(run.rows, key))
        parts += [(key, name, f"Pass rate, {what} {name}") for name in names]
    charts = []
    for key, name, title in parts:
        lines, words, guides = list[Any](), list[str](), list[Any]()
        unit = UNITS[runs[0].summary["fit"]["compute"]]
        for i, run in enumerate(runs):
            rows = parts_of(run.rows, key).get(name) if name else last_rows(run.rows, "eval")
            entry = (
                run.summary[key][name]["fit"] if name in run.summary[key] else run.summary["fit"]
            )
            label = f"{run.name}: " if len(runs) > 1 else ""
            if not rows:
                words.append(f"{label}no evaluation has been measured yet.")
                continue
            fit = run.fits[key].get(name)
            lines += _points(i, label, rows, entry["compute"])
            if fit is None:
                reason = entry["error"].partition(": ")[2]
                words.append(
                    f"{label}no curve is fitted to {entry['points']} evaluations: {reason}"
                )
                continue
            lines += _curve(i, fit, alone=len(runs) == 1)
            if len(runs) == 1:
                guides, words = _guides(fit), fit_words(fit)
            else:
                codes = ", ".join(warning.code for warning in fit.warnings if warning.serious)
                numbers = title_of(fit).partition(":  ")[2]
                words.append(f"{label}{numbers}{codes and f'; ill-conditioned: {codes}'}")
        chart = {"title": title, "unit": "fraction", "axis": f"compute ({unit})", "log": True}
        charts.append((chart | {"lines": lines, "guides": guides, "notes": [], "marks": []}, words))
    return charts


def _points(i: int, label: str, rows: list[Row], compute: str) -> list[Chart]:
    axis = axis_of(compute)
    used = [r for r in rows if None not in (r.get(axis), r.get("pass_rate"))]
    error = [r.get("pass_rate_stderr") or 0.0 for r in used]
    x, y = ([r[name] for r in used] for name in (axis, "pass_rate"))
    name = f"{label}measured" if not label else label[:-2]
    return [{"name": name, "color": i, "kind": "dots", "x": x, "y": y, "error": error}] if x else []


def _curve(i: int, fit: Any, *, alone: bool) -> list[Chart]:
    from megatron_rl.scaling.plot import axis_values, bands, value_range

    x = np.union1d(axis_values(fit, True, 120), axis_values(fit, False, 60))
    x = x[x > 0]
    shades, limits = list[Chart](), np.clip(value_range(fit, float(x[0])), 0, 1)
    for name, (ends, _) in bands(fit, x).items():
        low, high = np.clip(ends, *limits)
        band = {"name": name if alone else "", "color": i, "kind": "band"}
        shades.append(band | {"x": x, "low": low, "high": high})
    style = {"color": i, "kind": "line" if fit.well_conditioned or alone else "dash", "x": x}
    line = style | {"name": f"fit ({fit.estimate})" if alone else "", "y": fit.curve(x)}
    expected = {"name": "expected", "color": "ink", "kind": "dash", "x": x, "y": fit.predict(x)}
    return [*shades, line, expected] if alone else [shades[-1], line]


def _guides(fit: Any) -> list[list[Any]]:
    from megatron_rl.scaling.fit_result import amount

    guides: list[list[Any]] = [["y", fit.A.value, f"A = {fit.A.value:.3f}"]]
    if fit.Cmid is not None and fit.Cmid.value <= 1.6 * fit.series.compute[-1]:
        guides.append(["x", fit.Cmid.value, f"Cmid = {amount(fit.Cmid.value)}"])
    return guides


def fit_words(fit: Any) -> list[str]:
    """Return in plain words what a fit says, and what it cannot say."""
    from megatron_rl.scaling.fit_result import amount
    from megatron_rl.scaling.report import b_spec

    last, level = float(fit.series.compute[-1]), f"{fit.options.level:.0%}"
    expected = float(fit.predict(2 * last))
    low, high = np.clip(fit.band(2 * last, kind="curve"), 0, 1)
    cmid = (
        "" if fit.Cmid is None else f", and half of the gain at Cmid {fit.Cmid:amount} {fit.unit}"
    )
    curve = (f"The fitted curve ends at a pass rate of A {fit.A:.3f}, with steepness"
             f" B {format(fit.B, b_spec(fit))}{cmid}. Brackets: {level} intervals.")  # fmt: skip
    ahead = (f"With twice the compute of the last evaluation ({amount(2 * last)} {fit.unit}) it"
             f" expects {expected:.3f} [{low:.3f}, {high:.3f}].")  # fmt: skip
    if fit.well_conditioned:
        verdict = f"The {fit.n} evaluations determine the curve: the forecast is sound"
        verdict += " as long as nothing about the run changes."
    else:
        verdict = f"The {fit.n} evaluations do not determine the curve: it describes what was"
        verdict += " measured, and does not tell where the run would end."
    notes = (f"{w.text[:1].upper()}{w.text[1:]}." for w in fit.warnings)
    return [curve, ahead, verdict, *notes]
