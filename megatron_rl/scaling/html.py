"""One self-contained interactive page: numbers, warnings and a chart per fit; needs no network."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import MissingExtra
from .plot import COLORS, HELD_OUT, INK, SKIPPED, axis_values
from .report import amount, b_spec, roles, spread

if TYPE_CHECKING:
    from .fitting import Fit

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 1120px; margin: 2em auto;
  padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.15em; margin: 2em 0 .3em }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .35em .7em; border-bottom: 1px solid #e5e7eb }
th { color: #6b7280; font-weight: 600 } .good { color: #047857 } .ill { color: #b91c1c }
ul { margin: .3em 0 1em; padding-left: 1.2em } .note { color: #6b7280 }
.wide { overflow-x: auto; font-size: .93em }
td:first-child { min-width: 11em } td:not(:first-child) { white-space: nowrap }
"""


def save_html(fits: Sequence["Fit"], path: str | Path) -> None:
    """Write the page; a fit's chart switches between logarithmic and linear compute.

    Raises:
        MissingExtra: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
        import plotly.io as pio
    except ImportError as error:
        raise MissingExtra("plotly", "Writing HTML", "plot") from error
    body = ["<h1>Compute-performance fits</h1>", _table(fits)]
    for i, f in enumerate(fits):
        chart = pio.to_html(
            _chart(go, f),
            full_html=False,
            include_plotlyjs=i == 0,
            config={"displaylogo": False, "responsive": True},
        )
        body += [f"<h2>{escape(f.name or 'fit')}</h2>", chart, _notes(f)]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Compute-performance fits</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>"
    )
    Path(path).write_text(page, encoding="utf-8")


def _table(fits: Sequence["Fit"]) -> str:
    rows = []
    for f in fits:
        p = f.prediction
        held = "-" if p is None else f"{p.points}: rmse {p.rmse:.4f}, {p.coverage:.0%} in band"
        good = f.well_conditioned
        word, kind = ("good", "good") if good else ("ill", "ill")
        verdict = f'<span class="{kind}">{word}</span>'
        cells = (
            f.name,
            spread(f.A),
            spread(f.B, b_spec(f)),
            spread(f.Cmid, "amount"),
            str(f.n),
            held,
        )
        rows.append(
            "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + f"<td>{verdict}</td></tr>"
        )
    names = ("run", "A", "B", f"Cmid ({fits[0].unit})", "fitted", "held out", "verdict")
    head = "".join(f"<th>{escape(n)}</th>" for n in names)
    note = f"{fits[0].form}; intervals {fits[0].level:.0%}"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="wide">{table}</div><p class="note">{escape(note)}</p>'


def _notes(f: "Fit") -> str:
    lines = [f"R0 {spread(f.R0)}, {f.window.r0_rule}", f"skip: {f.window.skip_rule}"]
    lines += [f"repaired: {r}" for r in f.repairs]
    items = [f'<li class="note">{escape(t)}</li>' for t in lines]
    items += [f'<li class="{"ill" if w.serious else ""}">{escape(w.text)}</li>' for w in f.warnings]
    return f"<ul>{''.join(items)}</ul>"


def _chart(go: Any, f: "Fit") -> Any:
    # Both axes share one set of values: dense in the logarithm, and in the linear start as well.
    x = np.union1d(axis_values(f, True, 120), axis_values(f, False, 80))
    x = x[x > 0]
    figure = go.Figure()
    for kind, alpha, name in (("evaluation", 0.10, "evaluations"), ("curve", 0.20, "curve")):
        low, high = f.band(x, kind=kind)  # type: ignore[arg-type]
        label = f"{f.level:.0%} {name}"
        shade = {"fill": "toself", "fillcolor": f"rgba(37,99,235,{alpha})", "hoverinfo": "skip"}
        ring = {"x": np.concatenate([x, x[::-1]]), "y": np.concatenate([high, low[::-1]])}
        figure.add_scatter(**ring, mode="lines", line={"width": 0}, name=label, **shade)
    figure.add_scatter(
        x=x, y=f.curve(x), mode="lines", name="least squares", line={"color": COLORS[0]}
    )
    dash = {"color": INK, "width": 1.3, "dash": "dash"}
    figure.add_scatter(x=x, y=f.predict(x), mode="lines", name="expected", line=dash)
    part = np.array(roles(f))
    c, r, s = f.series.compute, f.series.reward, f.series.stderr
    styles = (
        ("used", "fitted", {"color": COLORS[0], "size": 8}),
        ("skipped", "skipped", {"color": SKIPPED, "size": 8, "symbol": "circle-open"}),
        ("r0", "R0", {"color": INK, "size": 8, "symbol": "square-open"}),
        ("held_out", "held out", {"color": HELD_OUT, "size": 8, "symbol": "diamond-open"}),
    )
    for role, name, marker in styles:
        mask = part == role
        if mask.any():
            error = None if s is None else {"type": "data", "array": s[mask], "thickness": 1}
            figure.add_scatter(
                x=c[mask], y=r[mask], mode="markers", name=name, marker=marker, error_y=error
            )
    figure.add_hline(
        y=f.A.value, line={"dash": "dot", "width": 1}, annotation_text=f"A = {f.A.value:.3f}",
        annotation_position="top left",
    )  # fmt: skip
    figure.add_hrect(y0=f.A.low, y1=f.A.high, fillcolor=INK, opacity=0.05, line_width=0)
    if f.Cmid is not None and x[0] < f.Cmid.value < x[-1]:
        # A line trace, not a shape: annotations of shapes do not follow a change of axis type.
        y = [float(np.min(r)), float(f.curve(f.Cmid.value))]
        figure.add_scatter(
            x=[f.Cmid.value] * 2, y=y, mode="lines+markers", name=f"Cmid = {amount(f.Cmid.value)}",
            line={"color": INK, "width": 1, "dash": "dot"}, marker={"symbol": "square", "size": 7},
        )  # fmt: skip
    log_range = [float(np.log10(axis_values(f, True)[0])), float(np.log10(x[-1]))]
    shown = np.concatenate([r, f.curve(x[x >= 10 ** log_range[0]]), [f.A.value]])
    span = float(shown.max() - shown.min())
    kinds = (("logarithmic", "log", log_range, "D2"), ("linear", "linear", [0, float(x[-1])], None))
    buttons = [
        {
            "label": word,
            "method": "relayout",
            "args": [{"xaxis.type": kind, "xaxis.range": span_, "xaxis.dtick": step}],
        }
        for word, kind, span_, step in kinds
    ]
    menu = {
        "type": "buttons",
        "direction": "right",
        "buttons": buttons,
        "x": 0,
        "y": 1.12,
        "xanchor": "left",
    }
    figure.update_layout(
        template="plotly_white", height=520, hovermode="closest", updatemenus=[menu],
        xaxis={
            "type": "log", "range": log_range, "dtick": "D2",
            "title": {"text": f"compute ({f.unit})"},
        },
        yaxis={
            "title": {"text": "pass rate"},
            "range": [float(shown.min()) - 0.1 * span, float(shown.max()) + 0.15 * span],
        },
        margin={"l": 60, "r": 20, "t": 60, "b": 50},
    )  # fmt: skip
    return figure
