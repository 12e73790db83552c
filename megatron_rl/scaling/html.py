"""One self-contained interactive page: numbers, warnings and a chart per fit; needs no network."""

from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from .curve import log_sigmoid
from .errors import require
from .fit_result import Fit, amount
from .paper_points import PaperRun
from .plot import COLORS, GRAY, INK, axis_values, bands, points_by_role, value_range
from .report import open_console, print_fits

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Compute-performance fits</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: {ink}; max-width: 1120px; margin: 2em auto }}
pre {{ overflow-x: auto; line-height: 1.2 }}
</style></head><body><h1>Compute-performance fits</h1>{body}</body></html>
"""


def save_html(fits: Sequence[Fit], path: str | Path, overlay: Sequence[PaperRun] = ()) -> None:
    """Write the page, whose charts switch between log and linear compute, or raise MissingExtra."""
    go, pio = (require(f"plotly.{m}", "Writing HTML") for m in ("graph_objects", "io"))
    console = open_console(record=True, file=StringIO(), width=132)
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
