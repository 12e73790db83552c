"""Results as JSON objects and as tables for the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import MissingExtra

if TYPE_CHECKING:
    from .compare import Comparison
    from .fit import Fit, Interval
    from .plan import Plan

SCHEMA_FIT = "megatron_rl.fit/1"
SCHEMA_FITS = "megatron_rl.fits/1"
SCHEMA_COMPARISON = "megatron_rl.comparison/1"
SCHEMA_PLAN = "megatron_rl.plan/1"


def number(x: float | None) -> float | None:
    """A JSON number; None (null) for an infinite or missing one."""
    return None if x is None or not np.isfinite(x) else float(x)


def interval(i: "Interval | None") -> dict[str, Any] | None:
    """JSON object of an interval."""
    if i is None:
        return None
    ends = {"value": number(i.value), "low": number(i.low), "high": number(i.high)}
    return {**ends, "fixed": i.fixed}


def roles(f: "Fit") -> list[str]:
    """Part of each point: used, skipped, held_out, or r0 (read as R0, or unused at compute 0)."""
    w = f.window
    out = np.full(len(f.series), "r0", dtype="<U8")
    out[w.used], out[w.skipped], out[w.held_out] = "used", "skipped", "held_out"
    return [str(r) for r in out]


def fit_to_dict(f: "Fit") -> dict[str, Any]:
    """Schema `megatron_rl.fit/1`; the fields are those of Fit (docs/scaling.md)."""
    w, p, s = f.window, f.prediction, f.series
    r0 = interval(f.R0)
    if r0 is not None:
        r0["rule"] = w.r0_rule
    prediction = None
    if p is not None:
        prediction = {
            "points": p.points, "rmse": p.rmse, "rmse_curve": p.rmse_curve, "bias": p.bias,
            "coverage": p.coverage, "first": p.first, "last": p.last,
        }  # fmt: skip
    stderr: Sequence[float | None] = [None] * len(s) if s.stderr is None else s.stderr.tolist()
    rows = zip(s.compute.tolist(), s.reward.tolist(), stderr, roles(f), strict=True)
    return {
        "schema": SCHEMA_FIT,
        "name": f.name,
        "source": s.source,
        "form": f.form,
        "method": f.method,
        "unit": f.unit,
        "level": f.level,
        "A": interval(f.A),
        "B": interval(f.B),
        "Cmid": interval(f.Cmid),
        "R0": r0,
        "D": interval(f.D),
        "sse": f.sse,
        "sigma": f.sigma,
        "correlated": f.correlated,
        "n": f.n,
        "n_skipped": int(w.skipped.sum()),
        "n_held_out": int(w.held_out.sum()),
        "skip": w.skip,
        "skip_rule": w.skip_rule,
        "fit_until": f.fit_until,
        "run_margin": f.run_margin,
        "well_conditioned": f.well_conditioned,
        "warnings": [x._asdict() for x in f.warnings],
        "repairs": list(f.repairs),
        "prediction": prediction,
        "points": [{"compute": c, "reward": r, "stderr": e, "role": o} for c, r, e, o in rows],
    }


def fits_to_dict(fits: Sequence["Fit"]) -> dict[str, Any]:
    """One fit as itself, several as `megatron_rl.fits/1` with a list `fits`."""
    if len(fits) == 1:
        return fit_to_dict(fits[0])
    return {"schema": SCHEMA_FITS, "fits": [fit_to_dict(f) for f in fits]}


def comparison_to_dict(c: "Comparison") -> dict[str, Any]:
    """Schema `megatron_rl.comparison/1`."""
    runs = []
    for e in c.entries:
        shared = None
        if e.shared is not None:
            shared = {"A": e.shared.A.value, "B": interval(e.shared.B)}
            shared["Cmid"] = interval(e.shared.Cmid)
        runs.append({"rank": e.rank, **fit_to_dict(e.fit), "at_shared_a": shared})
    pairs = [
        {
            "better": p.better,
            "other": p.other,
            "difference": interval(p.difference),
            "beyond_margin": p.beyond_margin,
            "verdict": p.verdict,
            "overtakes": interval(p.overtakes),
            "overtake_probability": p.overtake_probability,
        }
        for p in c.pairs
    ]
    head = {"schema": SCHEMA_COMPARISON, "margin": c.margin, "shared_a": c.shared_a}
    return {**head, "runs": runs, "pairs": pairs}


def plan_to_dict(p: "Plan") -> dict[str, Any]:
    """Schema `megatron_rl.plan/1`; an infinite compute is null."""
    return {
        "schema": SCHEMA_PLAN,
        "fit": fit_to_dict(p.fit),
        "now": p.now,
        "slope": interval(p.slope),
        "remaining": interval(p.remaining),
        "targets": [
            {
                "target": t.target,
                "compute": interval(t.compute),
                "probability": t.probability,
                "within_budget": t.within,
                "verdict": t.verdict,
            }
            for t in p.targets
        ],
        "gains": [
            {"compute": g.compute, "gain": interval(g.gain), "per_unit": interval(g.per_unit)}
            for g in p.gains
        ],
    }


def spread(i: "Interval | None", spec: str = ".3f") -> str:
    """`value [low, high]`, `value (fixed)` or a dash."""
    if i is None:
        return "-"
    if i.fixed and i.low == i.high:
        return f"{i.value:{spec}} fixed"
    low, high = (f"{x:{spec}}" if np.isfinite(x) else "never" for x in (i.low, i.high))
    value = f"{i.value:{spec}}" if np.isfinite(i.value) else "never"
    return f"{value} [{low}, {high}]"


def print_fits(fits: Sequence["Fit"]) -> None:
    """Table of fits, then for each what the reader must know: rules, repairs, warnings."""
    console, table = _table("run", "A", "B", "Cmid", "R0", "points", "sigma", "held out", "verdict")
    for f in fits:
        p = f.prediction
        held = "-" if p is None else f"{p.points}: rmse {p.rmse:.4f}, in band {p.coverage:.0%}"
        verdict = "[green]good[/]" if f.well_conditioned else "[bold red]ill-conditioned[/]"
        r0 = "-" if f.R0 is None else spread(f.R0)
        b = spread(f.B, ".2f" if f.form != "linear-sigmoid" else ".3g")
        cmid = spread(f.Cmid, ",.4g")
        row = (f.name, spread(f.A), b, cmid, r0, str(f.n), f"{f.sigma:.4f}", held, verdict)
        table.add_row(*row)
    console.print(table)
    first = fits[0]
    console.print(
        f"[dim]{first.form}, compute in {first.unit}, intervals {first.level:.0%}"
        + (f", run-to-run margin {first.run_margin:g} on A" if first.run_margin else "")
        + "[/]"
    )
    for f in fits:
        console.print(f"[bold]{f.name}[/]: R0 {f.window.r0_rule}; skip {f.window.skip_rule}")
        if f.D is not None:
            console.print(f"  D {spread(f.D, '.4g')} in A - D/C^B")
        for repair in f.repairs:
            console.print(f"  [cyan]repaired:[/] {repair}")
        for w in f.warnings:
            console.print(f"  [{'red' if w.serious else 'yellow'}]{w.code}:[/] {w.text}")


def print_comparison(c: "Comparison") -> None:
    """Ranking and neighbours."""
    console, table = _table("rank", "run", "A", "B", "B at shared A", "Cmid", "conditioned")
    for e in c.entries:
        f = e.fit
        at = "-" if e.shared is None else f"{spread(e.shared.B, '.2f')} at {e.shared.A.value:.3f}"
        good = "good" if f.well_conditioned else "[red]ill[/]"
        cmid = spread(f.Cmid, ",.4g")
        table.add_row(str(e.rank), f.name, spread(f.A), spread(f.B, ".2f"), at, cmid, good)
    console.print(table)
    by = f"by B at A = {c.shared_a:g}" if c.shared_a is not None else (
        f"by A; runs whose A agree within {c.margin:g} by B at their mean A"
    )
    console.print(f"[dim]ranked {by}; compute in {c.entries[0].fit.unit}[/]")
    for p in c.pairs:
        line = f"[bold]{p.better}[/] over [bold]{p.other}[/]: A {spread(p.difference, '+.3f')}, "
        line += f"P(more than {c.margin:g}) = {p.beyond_margin:.2f}; {p.verdict}"
        if p.overtakes is not None:
            line += f"; overtakes at {spread(p.overtakes, ',.4g')} (P {p.overtake_probability:.2f})"
        console.print(line)


def print_plan(p: "Plan") -> None:
    """Targets and gains."""
    f = p.fit
    console, table = _table("compute", "gain", f"gain per {f.unit}")
    for g in p.gains:
        row = (f"{g.compute:,.4g}", spread(g.gain, "+.4f"), spread(g.per_unit, ".3g"))
        table.add_row(*row)
    console.print(f"[bold]{f}[/]")
    console.print(
        f"at {p.now:,.4g} {f.unit}: {spread(p.slope, '.3g')} per further unit of compute, "
        f"{spread(p.remaining)} left to gain"
    )
    console.print(table)
    for t in p.targets:
        within = "" if t.within is None else f", within the budget P = {t.within:.2f}"
        console.print(
            f"[bold]{t.target:g}[/]: {spread(t.compute, ',.4g')} {f.unit}{within}; {t.verdict}"
        )


def _table(*columns: str) -> tuple[Any, Any]:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise MissingExtra("rich", "Printing tables", "plot") from error
    table = Table(*columns, header_style="bold")
    for column in table.columns:
        column.overflow = "fold"
    return Console(highlight=False), table
