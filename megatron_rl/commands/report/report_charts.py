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
from megatron_rl.metrics.curves import UNITS, parts_of, points_of
from megatron_rl.metrics.metrics_file import METRICS, Row, last_rows
from megatron_rl.scaling.fit_result import Fit, amount
from megatron_rl.scaling.plot import axis_values, bands, value_range
from megatron_rl.scaling.plot import title as title_of
from megatron_rl.scaling.report import b_spec

Chart = dict[str, Any]
MOST_POINTS = 400  # of a line: of more, neighbors are joined
MOST_MARKS = 60
_SECTIONS = (resources.files(__package__) / "charts.yaml").read_text()
CHARTS: dict[str, dict[str, list[str]]] = yaml.safe_load(_SECTIONS)  # section -> title -> metrics
MARKED = ("generator_lost", "resumed", "prompt_failed")
PASS_RATES = {
    "fit": "Held-out pass rate",
    "tasks": "Pass rate, task ",
    "sets": "Pass rate, evaluation set ",
}


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
    unit = units.pop() if len(units) == 1 else ""
    marks = _marks(runs[0].rows) if len(runs) == 1 else []
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


def _marks(rows: list[Row]) -> list[list[Any]]:
    """Return (step, text) of the newest events that a chart marks."""
    events = [row for row in rows if row.get("event") in MARKED][-MOST_MARKS:]
    return [[row["step"], f"{row['event']} {row.get('generator', '')}"] for row in events]


def pass_rate_charts(runs: list[RunFacts]) -> list[tuple[Chart, list[str]]]:
    """Return the charts of held-out prompts, of each task and of each set, with their words."""
    axis = f"compute ({UNITS[runs[0].summary['fit']['compute']]})"
    charts = []
    for key, title in PASS_RATES.items():
        parts = [parts_of(run.rows, key) for run in runs]
        for name in dict.fromkeys(name for evaluations in parts for name in evaluations):
            chart = {"title": title + name, "unit": "fraction", "axis": axis, "log": True,
                     "lines": [], "guides": [], "notes": [], "marks": []}  # fmt: skip
            words = list[str]()
            for i, (run, evaluations) in enumerate(zip(runs, parts, strict=True)):
                about = _add_run(chart, i, run, key, name, evaluations.get(name), len(runs) == 1)
                words += about if len(runs) == 1 else [f"{run.name}: {text}" for text in about]
            charts.append((chart, words))
    return charts


def _add_run(
    chart: Chart, i: int, run: RunFacts, key: str, name: str, rows: list[Row] | None, alone: bool
) -> list[str]:
    """Add measurements and fit of a run to a chart; return what is said about them."""
    if not rows:
        return ["no evaluation has been measured yet."]
    entry = run.summary[key][name]["fit"] if name in run.summary[key] else run.summary["fit"]
    used, x, y = points_of(rows, entry["compute"])
    if x:
        error = [row.get("pass_rate_stderr") or 0.0 for row in used]
        label = "measured" if alone else run.name
        dots = {"name": label, "color": i, "kind": "dots", "x": x, "y": y, "error": error}
        chart["lines"].append(dots)
    if (fit := run.fits[key].get(name)) is None:
        reason = entry["error"].partition(": ")[2]
        return [f"no curve is fitted to {entry['points']} evaluations: {reason}"]
    chart["lines"] += _curve(i, fit, alone=alone)
    if alone:
        chart["guides"] = _guides(fit)
        return fit_words(fit)
    codes = ", ".join(warning.code for warning in fit.warnings if warning.serious)
    return [f"{title_of(fit).partition(':  ')[2]}{codes and f'; ill-conditioned: {codes}'}"]


def _curve(i: int, fit: Fit, *, alone: bool) -> list[Chart]:
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


def _guides(fit: Fit) -> list[list[Any]]:
    guides: list[list[Any]] = [["y", fit.A.value, f"A = {fit.A.value:.3f}"]]
    if fit.Cmid is not None and fit.Cmid.value <= 1.6 * fit.series.compute[-1]:
        guides.append(["x", fit.Cmid.value, f"Cmid = {amount(fit.Cmid.value)}"])
    return guides


def fit_words(fit: Fit) -> list[str]:
    """Return in plain words what a fit says, and what it cannot say."""
    last, level = float(fit.series.compute[-1]), f"{fit.options.level:.0%}"
    expected = float(fit.predict(2 * last))
    low, high = np.clip(fit.band(2 * last, kind="curve"), 0, 1)
    cmid = fit.Cmid and f", and half of the gain at Cmid {fit.Cmid:amount} {fit.unit}"
    if fit.well_conditioned:
        verdict = "determine the curve: the forecast is sound as long as nothing about the run"
        verdict += " changes."
    else:
        verdict = "do not determine the curve: it describes what was measured, and does not tell"
        verdict += " where the run would end."
    return [
        f"The fitted curve ends at a pass rate of A {fit.A:.3f}, with steepness"
        f" B {format(fit.B, b_spec(fit))}{cmid or ''}. Brackets: {level} intervals.",
        f"With twice the compute of the last evaluation ({amount(2 * last)} {fit.unit}) it"
        f" expects {expected:.3f} [{low:.3f}, {high:.3f}].",
        f"The {fit.n} evaluations {verdict}",
        *(f"{w.text[:1].upper()}{w.text[1:]}." for w in fit.warnings),
    ]
