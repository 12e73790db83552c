"""Pictures of fits and comparisons, and one self-contained interactive page of fits.

Pictures are PNG, SVG or PDF by the ending of their path. The page has numbers, warnings and a chart
per fit, and needs no network.
"""

from collections.abc import Iterator, Sequence
from html import escape
from io import StringIO
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from .comparison import Comparison, transform
from .curve import Array, log_sigmoid
from .errors import PointsError, require
from .fit_result import Fit, amount
from .paper_points import PaperRun
from .report import b_spec, print_fits, roles
from .series import Series

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
HELD_OUT, INK, RED, GRAY = "#ea580c", "#1f2937", "#b91c1c", "#6b7280"
ENDINGS = (".png", ".svg", ".pdf")
ROLES = {  # label, color and symbols (matplotlib's and plotly's) of the points by their role
    "used": ("fitted", COLORS[0], "o", "circle"),
    "skipped": ("skipped", "#9ca3af", "o", "circle-open"),
    "held_out": ("held out", HELD_OUT, "D", "diamond-open"),
}
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Compute-performance fits</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: {ink}; max-width: 1120px; margin: 2em auto }}
pre {{ overflow-x: auto; line-height: 1.2 }}
</style></head><body><h1>Compute-performance fits</h1>{body}</body></html>
"""


def save_plot(f: Fit, path: str | Path, overlay: Sequence[PaperRun] = ()) -> None:
    """Draw a fit on logarithmic and linear compute: points by their role, curve, band, A and Cmid.

    `overlay` are published runs to draw as well. For errors of this function and the next two see
    `_figure`.
    """
    figure, axes = _panels([(f, True), (f, False)], path, overlay)
    axes[1].tick_params(labelleft=True)
    figure.suptitle(title(f), fontsize=11, color=INK)
    if not f.well_conditioned:
        codes = ", ".join(w.code for w in f.warnings if w.serious)
        axes[0].set_title(f"ill-conditioned: {codes}", fontsize=9, color=RED, loc="left")
    figure.savefig(path, dpi=150)


def save_panels(fits: Sequence[Fit], path: str | Path) -> None:
    """Draw fits side by side on logarithmic compute, one panel and title each."""
    figure, axes = _panels([(f, True) for f in fits], path)
    for axis, f in zip(axes, fits, strict=True):
        axis.set_title(title(f).replace(":  ", "\n", 1), fontsize=9, color=INK)
    figure.savefig(path, dpi=150)


def save_comparison(c: Comparison, path: str | Path, overlay: Sequence[PaperRun] = ()) -> None:
    """Draw the curves of all runs, and next to them the leave-one-out transform.

    With a shared A the transform uses each run's refit at it, so that slopes are comparable.
    Ill-conditioned runs are dashed and lighter. `overlay` are published runs to draw as well.
    """
    figure = _figure(path, (12, 5.2 + 0.11 * len(c.entries)))
    left, right = axes = figure.subplots(1, 2, subplot_kw={"xscale": "log"})
    for i, entry in enumerate(c.entries):
        f, b = entry.fit, entry.shared or entry.fit
        x, used = axis_values(f, True), f.window.used
        style: dict[str, Any] = {"color": COLORS[i % len(COLORS)]}
        label = f"{entry.rank}. {f.name}:  A {f.A:.3f},  B {b.B:.2f}"
        if entry.shared is not None:
            label += f" at A {entry.shared.A.value:.3f}"
        if not f.well_conditioned:
            style |= {"alpha": 0.45, "ls": (0, (4, 2))}
            label += "  (ill-conditioned)"
        dots = style | {"ls": "", "marker": "o", "ms": 3.5}
        left.plot(f.series.compute[used], f.series.reward[used], **dots)
        left.plot(x, f.curve(x), lw=1.8, label=label, **style)
        shade = 0.10 if f.well_conditioned else 0.04
        left.fill_between(x, *f.band(x, kind="curve"), color=style["color"], alpha=shade, lw=0)
        if b.Cmid is not None:
            cmid, slope = b.Cmid.value, b.B.value
            compute, value = transform(b)
            right.plot(compute, value / cmid**slope, **dots)
            ends = np.array([compute.min(), compute.max()] if len(compute) else [1.0, 2.0])
            right.plot(ends, (ends / cmid) ** slope, lw=1.5, **style)
    _draw_published(left, overlay)
    left.set_ylabel("pass rate")
    right.set_yscale("log")
    right.set_ylabel(r"$F(R) / C_{mid}^{\,B} = 1 / \left(\frac{A-R_0}{R-R_0} - 1\right)$")
    right.set_title("leave-one-out transform: slope B", fontsize=10, color=INK)
    for axis in axes:
        axis.set_xlabel(f"compute ({c.entries[0].fit.unit})")
        _tidy(axis)
    # Below the panels: inside one of them it would lie on a curve.
    style = {"fontsize": 7.2, "frameon": False, "handlelength": 1.8, "columnspacing": 1.0}
    columns = 2 if len(c.entries) + len(overlay) > 3 else 1
    figure.legend(loc="outside lower center", ncols=columns, **style)
    figure.savefig(path, dpi=150)


def title(f: Fit) -> str:
    """Return name and parameters in one line."""
    median = " (median)" * (f.estimate == "median")
    cmid = "" if f.Cmid is None else f",  Cmid {f.Cmid:amount}"
    return f"{f.name or 'fit'}:  A {f.A:.3f}{median},  B {format(f.B, b_spec(f))}{cmid}"


def axis_values(f: Fit, log: bool, points: int = 240) -> Array:
    """Return the computes at which curve and band are drawn: the data, and 1.6 times beyond."""
    c = f.series.compute
    first, top = float(c[c > 0][0]), float(c[-1]) * 1.6
    if log:
        return np.geomspace(first * 0.8, top, points)
    return np.linspace(0.0 if f.options.form != "power-law" else first * 0.5, top, points)


def value_range(f: Fit, start: float) -> tuple[float, float]:
    """Return the limits of the pass rate: points, A and the curve at `start`, with margins.

    The curve before the data may fall far below them: the power law has no floor.
    """
    shown = [*f.series.reward, float(f.curve(start)), f.A.value]
    low, high = float(min(shown)), float(max(shown))
    return low - 0.08 * (high - low), high + 0.12 * (high - low)


def points_by_role(f: Fit) -> Iterator[tuple[tuple[str, str, str, str], Series]]:
    """Yield the style in ROLES and the points of each role that has any."""
    for role, style in ROLES.items():
        if (part := roles(f) == role).any():
            yield style, f.series.take(part)


def bands(f: Fit, x: Array) -> dict[str, tuple[tuple[Array, Array], float]]:
    """Return label -> ends and opacity of the bands at x."""
    level, curve = f"{f.options.level:.0%}", f.band(x, kind="curve")
    return {f"{level} evaluations": (f.band(x), 0.10), f"{level} curve": (curve, 0.20)}


def _panels(
    panels: Sequence[tuple[Fit, bool]], path: str | Path, overlay: Sequence[PaperRun] = ()
) -> tuple[Any, Any]:
    """Draw fits side by side, each on logarithmic compute or not; return figure and axes."""
    figure = _figure(path, (6 * len(panels), 4.8))
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    limits = []
    for axis, (f, log) in zip(axes, panels, strict=True):
        _draw(axis, f, log)
        _draw_published(axis, overlay)
        limits.append(axis.get_ylim())
    axes[0].set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    axes[0].set_ylabel("pass rate")
    handles, labels = axes[-1].get_legend_handles_labels()
    columns = min(len(labels), 4 if overlay else 7)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure, axes


def _draw(axis: Any, f: Fit, log: bool) -> None:
    x, color = axis_values(f, log), COLORS[0]
    for label, (band, alpha) in bands(f, x).items():
        axis.fill_between(x, *band, color=color, alpha=alpha, lw=0, label=label)
    axis.plot(x, f.curve(x), color=color, lw=2, label=f.estimate)
    axis.plot(x, f.predict(x), color=INK, lw=1.2, ls=(0, (4, 2)), label="expected")
    for (name, ink, marker, _), points in points_by_role(f):
        style = {"color": ink, "ms": 5, "mfc": ink if name == "fitted" else "white"}
        style |= {"fmt": marker, "elinewidth": 0.8, "zorder": 5, "label": f"{name} ({len(points)})"}
        shown = points.take((points.compute > 0) | (not log))
        if len(shown):
            axis.errorbar(shown.compute, shown.reward, shown.stderr, **style)
    text = {"textcoords": "offset points", "fontsize": 9, "color": INK}
    axis.axhline(f.A.value, color=INK, lw=0.9, ls=":")
    axis.axhspan(f.A.low, f.A.high, color=INK, alpha=0.05, lw=0)
    label, at = f"A = {f.A.value:.3f}", (0.02, f.A.value)
    axis.annotate(label, at, xycoords=("axes fraction", "data"), xytext=(0, 3), **text)
    if f.Cmid is not None and x[0] < f.Cmid.value < x[-1]:
        cmid = f.Cmid.value
        axis.axvline(cmid, color=INK, lw=0.9, ls=":")
        axis.plot([cmid], [float(f.curve(cmid))], "s", color=INK, ms=5, zorder=6)
        label, at = f"Cmid = {amount(cmid)}", (cmid, 0.03)
        axis.annotate(label, at, xycoords=("data", "axes fraction"), xytext=(4, 0), **text)
    if f.options.fit_until is not None and x[0] < f.options.fit_until < x[-1]:
        axis.axvline(f.options.fit_until, color=HELD_OUT, lw=1, ls="--")
    axis.set_xscale("log" if log else "linear")
    axis.set_xlim(x[0] if log else -0.02 * x[-1], x[-1])
    axis.set_ylim(*value_range(f, float(f.series.compute[f.series.compute > 0][0])))
    axis.set_xlabel(f"compute ({f.unit}), {'logarithmic' if log else 'linear'}")
    _tidy(axis)


def _draw_published(axis: Any, overlay: Sequence[PaperRun]) -> None:
    """Draw the points and curves of published runs, and widen the axes to them."""
    x0, x1 = axis.get_xlim()
    y0, y1 = axis.get_ylim()
    log = axis.get_xscale() == "log"
    for run, marker in zip(overlay, cycle("^vDsP*"), strict=False):
        c, y = run.points.compute, run.points.reward
        style = {"color": GRAY, "ms": 4, "mfc": "none", "mew": 0.8, "zorder": 1.5}
        axis.plot(c, y, marker, label=f"published {run}", **style)
        x0, x1 = min(x0, float(c[0]) * 0.8) if log else x0, max(x1, float(c[-1]) * 1.1)
        y0, y1 = min(y0, float(y.min()) - 0.02), max(y1, float(y.max()) + 0.02)
        if run.parameters is not None:
            x = np.geomspace(c[0], x1, 200)
            axis.plot(x, log_sigmoid(x, **run.parameters), color=GRAY, lw=1, ls=":")
    axis.set(xlim=(x0, x1), ylim=(y0, y1))


def _tidy(axis: Any) -> None:
    ticker = require("matplotlib.ticker", "Drawing a plot")
    axis.grid(True, which="major", color="#e5e7eb", lw=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_xscale() == "log":
        low, high = axis.get_xlim()
        subs = (1.0,) if np.log10(high / low) > 2 else (1.0, 2.0, 5.0)
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=subs))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(5))  # labels of millions need their width
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: amount(v)))


def _figure(path: str | Path, size: tuple[float, float]) -> Any:
    """Return an empty figure, or raise PointsError (ending of the path) or MissingExtra."""
    if Path(path).suffix.lower() not in ENDINGS:
        remedy = f"Choose a path that ends in {', '.join(ENDINGS)}"
        raise PointsError(f"cannot draw '{path}'", remedy)
    figures = require("matplotlib.figure", "Drawing a plot")
    return figures.Figure(figsize=size, layout="constrained", facecolor="white")


def save_html(fits: Sequence[Fit], path: str | Path, overlay: Sequence[PaperRun] = ()) -> None:
    """Write the page, whose charts switch between log and linear compute, or raise MissingExtra."""
    go, pio = (require(f"plotly.{m}", "Writing HTML") for m in ("graph_objects", "io"))
    console = Console(record=True, file=StringIO(), width=132, highlight=False)
    print_fits(console, fits)
    body = [console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")]
    config = {"displaylogo": False, "responsive": True}
    for i, f in enumerate(fits):
        chart = _chart(go, f, overlay)
        html = pio.to_html(chart, config, full_html=False, include_plotlyjs=i == 0)
        body += [f"<h2>{escape(f.name or 'fit')}</h2>", html]
    Path(path).write_text(PAGE.format(ink=INK, body="".join(body)), encoding="utf-8")


def _chart(go: Any, f: Fit, overlay: Sequence[PaperRun]) -> Any:
    # Both axes share one set of values: dense in the logarithm, and in the linear start as well.
    log_values = axis_values(f, True, 120)
    x = np.union1d(log_values, axis_values(f, False, 80))
    x, figure = x[x > 0], go.Figure()
    for name, ((low, high), alpha) in bands(f, x).items():
        ring = {"x": np.concatenate([x, x[::-1]]), "y": np.concatenate([high, low[::-1]])}
        shade = {"fill": "toself", "fillcolor": f"rgba(37,99,235,{alpha})", "line_width": 0}
        figure.add_scatter(**ring, **shade, mode="lines", name=name, hoverinfo="skip")
    line, dash = {"color": COLORS[0]}, {"color": INK, "width": 1.3, "dash": "dash"}
    figure.add_scatter(x=x, y=f.curve(x), mode="lines", name=f.estimate, line=line)
    figure.add_scatter(x=x, y=f.predict(x), mode="lines", name="expected", line=dash)
    for (name, color, _, symbol), s in points_by_role(f):
        bars = None if s.stderr is None else {"type": "data", "array": s.stderr, "thickness": 1}
        marker = {"color": color, "symbol": symbol, "size": 8}
        points = {"x": s.compute, "y": s.reward, "error_y": bars, "marker": marker}
        figure.add_scatter(**points, mode="markers", name=name)
    first, last = log_values[0], log_values[-1]
    if f.Cmid is not None and first < f.Cmid.value < last:
        # A line trace, not a shape: annotations of shapes do not follow a change of axis type.
        y = [float(f.series.reward.min()), float(f.curve(f.Cmid.value))]
        label = f"Cmid = {amount(f.Cmid.value)}"
        thin = {"color": INK, "width": 1, "dash": "dot"}
        figure.add_scatter(x=[f.Cmid.value] * 2, y=y, mode="lines+markers", name=label, line=thin)
    for run in overlay:
        c, p, style = run.points.compute, run.parameters, {"color": GRAY, "width": 1, "dash": "dot"}
        mode, label = {"mode": "markers", "marker_color": GRAY}, f"published {run}"
        figure.add_scatter(x=c, y=run.points.reward, name=label, **mode)
        if p is not None:
            figure.add_scatter(x=c, y=log_sigmoid(c, **p), mode="lines", line=style, name="Table 1")
        x = np.union1d(x, c)
    label, dots = f"A = {f.A.value:.3f}", {"dash": "dot", "width": 1}
    figure.add_hline(f.A.value, line=dots, annotation_text=label, annotation_position="top left")
    figure.add_hrect(f.A.low, f.A.high, fillcolor=INK, opacity=0.05, line_width=0)
    log_range = np.log10([min(log_values[0], x[0]) if overlay else log_values[0], x[-1]]).tolist()
    scales = (("logarithmic", "log", log_range, "D2"), ("linear", "linear", [0, x[-1]], None))
    buttons = []
    for text, kind, limits, step in scales:
        change = {"xaxis.type": kind, "xaxis.range": limits, "xaxis.dtick": step}
        buttons.append({"label": text, "method": "relayout", "args": [change]})
    menu = {"type": "buttons", "direction": "right", "x": 0, "y": 1.12, "xanchor": "left"}
    limits = value_range(f, float(log_values[0]))
    rewards = [v for run in overlay for v in (run.points.reward.min(), run.points.reward.max())]
    limits = min([limits[0], *rewards]), max([limits[1], *rewards])
    figure.update_xaxes(type="log", range=log_range, dtick="D2", title=f"compute ({f.unit})")
    figure.update_yaxes(title="pass rate", range=limits)
    style = {"template": "plotly_white", "height": 520, "hovermode": "closest"}
    margin = {"l": 60, "r": 20, "t": 60, "b": 50}
    return figure.update_layout(updatemenus=[menu | {"buttons": buttons}], margin=margin, **style)
