"""Results as JSON objects and as tables for the terminal."""

import math
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from .comparison import Comparison
from .fit_result import Fit, Interval, amount
from .fitting import MEANINGS
from .forecasting import Forecast

FIT_KEYS = (
    "name", "unit", "A", "B", "Cmid", "R0", "D", "estimate", "sse", "sigma", "correlated", "n",
    "well_conditioned", "warnings", "prediction",
)  # fmt: skip
OPTION_KEYS = ("form", "method", "level", "fit_until", "run_margin")


def plain(value: Any) -> Any:
    """Return a value for JSON: dataclasses as objects, infinite numbers as None (null)."""
    if isinstance(value, Fit):
        return fit_to_dict(value)
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def roles(f: Fit) -> NDArray[np.str_]:
    """Return the role of each point: used, skipped or held_out."""
    return np.select([f.window.used, f.window.skipped], ["used", "skipped"], "held_out")


def fit_to_dict(f: Fit) -> dict[str, Any]:
    """Return schema `megatron_rl.fit/1` (docs/scaling.md)."""
    w, s, least, shape = f.window, f.series, f.least_squares, f.problem.shape
    cmid = float(shape.cmid(least.u)) if shape.has_u else None
    stderr: Sequence[float | None] = [None] * len(s) if s.stderr is None else s.stderr.tolist()
    rows = zip(s.compute.tolist(), s.reward.tolist(), stderr, roles(f).tolist(), strict=True)
    return {
        "schema": "megatron_rl.fit/1",
        **{key: plain(getattr(f, key)) for key in FIT_KEYS},
        "least_squares": {"A": least.a, "B": float(shape.b(least.v)), "Cmid": cmid},
        **{key: getattr(f.options, key) for key in OPTION_KEYS},
        "source": s.source,
        "n_skipped": int(w.skipped.sum()),
        "n_held_out": int(w.held_out.sum()),
        "skip": w.skip,
        "repairs": list(s.repairs),
        "points": [{"compute": c, "reward": r, "stderr": e, "role": x} for c, r, e, x in rows],
    }


def one_or_several(name: str, objects: Sequence[Any]) -> dict[str, Any]:
    """Return one fit or forecast as itself, several as `megatron_rl.<name>s/1` with a list."""
    items = [{"schema": f"megatron_rl.{name}/1", **plain(each)} for each in objects]
    several = {"schema": f"megatron_rl.{name}s/1", f"{name}s": items}
    return items[0] if len(items) == 1 else several


def comparison_to_dict(c: Comparison) -> dict[str, Any]:
    """Return schema `megatron_rl.comparison/1`."""
    runs = []
    for e in c.entries:
        s = e.shared
        shared = s and {"A": s.A.value, "B": plain(s.B), "Cmid": plain(s.Cmid)}
        runs.append({"rank": e.rank, **fit_to_dict(e.fit), "at_shared_a": shared})
    head = {"schema": "megatron_rl.comparison/1", "margin": c.margin, "shared_a": c.shared_a}
    return {**head, "runs": runs, "pairs": plain(c.pairs)}


def b_spec(f: Fit) -> str:
    """Return the format of B: in linear compute it depends on the unit."""
    return ".3g" if f.options.form == "linear-sigmoid" else ".2f"


def print_fits(console: Console, fits: Sequence[Fit]) -> None:
    """Print the table of fits, then the points and rules of each, repairs and warnings."""
    unit, o = fits[0].unit, fits[0].options
    table = _table("run", "A", "B", f"Cmid\n{unit}", "verdict")
    for f in fits:
        verdict = "[green]good[/]" if f.well_conditioned else f"[bold red]ill[/]\n{f.estimate}"
        cells = (_cell(f.A), _cell(f.B, b_spec(f)), _cell(f.Cmid, "amount"))
        table.add_row(wrap(f.name), *cells, verdict)
    console.print(table)
    rules = f"{o.form}, {o.method} method, compute in {unit}, intervals {o.level:.0%}"
    margin = f", run-to-run margin {o.run_margin:.3g} on A" if o.run_margin else ""
    console.print(f"[dim]{rules}{margin}[/]")
    for f in fits:
        r0 = "" if f.R0 is None else f"R0 {f.R0:.3f}, "
        text = f"{r0}{f.n} points, noise {f.sigma:.4f}, sum of squares {f.sse:.4g}"
        if p := f.prediction:
            text += f"; {p.points} held out: rmse {p.rmse:.4f}, {p.coverage:.0%} in band"
        if f.D is not None:
            text += f"; D {f.D:.4g} in A - D/C^B"
        console.print(f"[bold]{f.name}[/]: {text}")
    _print_notes(console, fits)


def _print_notes(console: Console, fits: Sequence[Fit]) -> None:
    """Print each repair and warning once: with its numbers for one run, else with their names."""
    notes: dict[tuple[str, str], dict[str, str]] = {}
    for f in fits:
        for repair in f.series.repairs:
            notes.setdefault(("cyan", f"repaired: {repair}"), {})[f.name] = ""
        for w in f.warnings:
            notes.setdefault(("red" if w.serious else "yellow", w.code), {})[f.name] = w.text
    for (color, code), texts in notes.items():
        text = MEANINGS.get(code, "") if len(texts) > 1 else next(iter(texts.values()))
        runs = f" ({', '.join(texts)})" if len(fits) > 1 else ""
        console.print(f"[{color}]{code}[/]{runs}{': ' if text else ''}{text}")


def print_comparison(console: Console, c: Comparison) -> None:
    """Print the ranking, each run against the next, repairs and warnings."""
    shared = any(e.shared for e in c.entries)
    table = _table("run", "A", "B", *["B at\nshared A"] * shared, "Cmid")
    for e in c.entries:
        f, at = e.fit, ["-"] * shared
        if e.shared is not None:
            value, ends = e.shared.B.parts(b_spec(f))
            at = [f"{value} at {e.shared.A.value:.3f}\n{ends}"]
        ill = "" if f.well_conditioned else f"\n[red]ill: {f.estimate}[/]"
        cells = (_cell(f.A), _cell(f.B, b_spec(f)), *at, _cell(f.Cmid, "amount"))
        table.add_row(wrap(f"{e.rank}. {f.name}") + ill, *cells)
    console.print(table)
    by_a = f"by A; runs whose A agree within {c.margin:.3g} by B at their mean A"
    rule = by_a if c.shared_a is None else f"by B at A = {c.shared_a:.4g}"
    console.print(f"[dim]ranked {rule}; compute in {c.entries[0].fit.unit}[/]")
    for p in c.pairs:
        line = f"[bold]{p.better}[/] over [bold]{p.other}[/]: A {p.difference:+.3f}, "
        line += f"P(more than {c.margin:.3g}) = {p.beyond_margin:.2f}; {p.verdict}"
        if p.overtakes is not None:
            line += f"; overtakes at {p.overtakes:amount} (P {p.overtake_probability:.2f})"
        console.print(line)
    _print_notes(console, [e.fit for e in c.entries])


def print_forecast(console: Console, p: Forecast) -> None:
    """Print targets and gains."""
    f = p.fit
    table = _table("compute", "gain", f"gain per {f.unit}")
    for g in p.gains:
        table.add_row(amount(g.compute), format(g.gain, "+.4f"), format(g.per_unit, ".3g"))
    slope = f"at {amount(p.now)} {f.unit}: {p.slope:.3g} per further unit of compute"
    console.print(f"[bold]{f}[/]\n{slope}, {p.remaining:.3f} left to gain", table, sep="\n")
    for t in p.targets:
        line = f"[bold]{t.target:g}[/]: {t.compute:amount} {f.unit}"
        if t.within_budget is not None:
            line += f", within the budget P = {t.within_budget:.2f}"
        console.print(f"{line}; {t.verdict}")


def _cell(i: Interval | None, spec: str = ".3f") -> str:
    return "-" if i is None else "\n".join(i.parts(spec))


def wrap(name: str, width: int = 17) -> str:
    """Return a name in lines of at most `width` characters, broken after separators only."""
    lines = [""]
    for part in re.split(r"(?<=[-_/.:, ])", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _table(*columns: str) -> Table:
    heads = [Column(c, overflow="fold", no_wrap=c == "run") for c in columns]
    style: dict[str, Any] = {"header_style": "bold", "show_edge": False, "padding": (0, 1, 0, 0)}
    return Table(*heads, box=SIMPLE_HEAD, **style)
