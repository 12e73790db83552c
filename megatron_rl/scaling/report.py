"""Results as JSON objects and as tables for the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import MissingExtra

if TYPE_CHECKING:
    from .comparison import Comparison
    from .fitting import Fit, Interval
    from .forecasting import Forecast

SCHEMA_FIT = "megatron_rl.fit/1"
SCHEMA_FITS = "megatron_rl.fits/1"
SCHEMA_COMPARISON = "megatron_rl.comparison/1"
SCHEMA_FORECAST = "megatron_rl.forecast/1"


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


Resampled = Sequence[dict[str, "Interval"]]


def fits_to_dict(fits: Sequence["Fit"], resampled: Resampled | None = None) -> dict[str, Any]:
    """One fit as itself, several as `megatron_rl.fits/1` with a list `fits`.

    Bootstrap intervals, one dictionary per fit, become its key `bootstrap`.
    """
    made = [fit_to_dict(f) for f in fits]
    for one, extra in zip(made, resampled or (), strict=False):
        one["bootstrap"] = {k: interval(i) for k, i in extra.items()}
    return made[0] if len(made) == 1 else {"schema": SCHEMA_FITS, "fits": made}


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


def forecast_to_dict(p: "Forecast") -> dict[str, Any]:
    """Schema `megatron_rl.forecast/1`; an infinite compute is null."""
    return {
        "schema": SCHEMA_FORECAST,
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
    """`value [low, high]`, `value fixed` or a dash."""
    return " ".join(parts(i, spec))


def parts(i: "Interval | None", spec: str = ".3f") -> tuple[str, ...]:
    """Value and interval as two texts; `spec` is a format, or "amount" for compute."""
    if i is None:
        return ("-",)
    write = amount if spec == "amount" else lambda x: f"{x:{spec}}"
    value, low, high = (write(x) if np.isfinite(x) else "never" for x in (i.value, i.low, i.high))
    return (value, "fixed") if i.fixed and i.low == i.high else (value, f"[{low}, {high}]")


def amount(x: float) -> str:
    """Compute with four digits: 2,403 or 33,000 or 1.2e+13."""
    if 1000 <= abs(x) < 1e7:
        digits = max(0, int(np.log10(abs(x))) - 3)
        return f"{round(x, -digits):,.0f}"
    return f"{x:.4g}"


def b_spec(f: "Fit") -> str:
    """Format of B: its size is free only per unit of linear compute."""
    return ".3g" if f.form == "linear-sigmoid" else ".2f"


def print_fits(fits: Sequence["Fit"]) -> None:
    """Table of fits, then for each what the reader must know: rules, repairs, warnings."""
    unit = fits[0].unit
    console, table = _table("run", "A", "B", f"Cmid\n{unit}", "points", "held out", "verdict")
    for f in fits:
        p = f.prediction
        held = "-" if p is None else f"{p.points}: rmse {p.rmse:.4f}\n{p.coverage:.0%} in band"
        verdict = "[green]good[/]" if f.well_conditioned else "[bold red]ill[/]"
        cells = (parts(f.A), parts(f.B, b_spec(f)), parts(f.Cmid, "amount"))
        table.add_row(f.name, *("\n".join(c) for c in cells), str(f.n), held, verdict)
    console.print(table)
    first = fits[0]
    margin = f", run-to-run margin {first.run_margin:g} on A" if first.run_margin else ""
    console.print(
        f"[dim]{first.form}, {first.method} method, compute in {unit}, "
        f"intervals {first.level:.0%}{margin}[/]"
    )
    for f in fits:
        r0 = "" if f.R0 is None else f" {spread(f.R0)}"
        console.print(f"[bold]{f.name}[/]: R0{r0}, {f.window.r0_rule}; skip {f.window.skip_rule}")
        console.print(f"  noise {f.sigma:.4f}, sum of squares {f.sse:.4g}")
        if f.D is not None:
            console.print(f"  D {spread(f.D, '.4g')} in A - D/C^B")
        for repair in f.repairs:
            console.print(f"  [cyan]repaired:[/] {repair}")
        for w in f.warnings:
            console.print(f"  [{'red' if w.serious else 'yellow'}]{w.code}:[/] {w.text}")


def print_bootstrap(fits: Sequence["Fit"], resampled: Resampled, n: int) -> None:
    """Bootstrap intervals beside the profile intervals."""
    console, table = _table("run", "A", "B", "Cmid")
    for f, r in zip(fits, resampled, strict=True):
        cells = (parts(r.get("A")), parts(r["B"], b_spec(f)), parts(r.get("Cmid"), "amount"))
        table.add_row(f.name, *("\n".join(c) for c in cells))
    console.print(f"moving-block bootstrap, {n} resamples:")
    console.print(table)


def print_comparison(c: "Comparison") -> None:
    """Ranking and neighbours."""
    console, table = _table("rank", "run", "A", "B", "B at shared A", "Cmid", "verdict")
    for e in c.entries:
        f = e.fit
        at = "-"
        if e.shared is not None:
            value, ends = parts(e.shared.B, b_spec(f))
            at = f"{value} at {e.shared.A.value:.3f}\n{ends}"
        good = "good" if f.well_conditioned else "[red]ill[/]"
        cells = (parts(f.A), parts(f.B, b_spec(f)), (at,), parts(f.Cmid, "amount"))
        table.add_row(str(e.rank), f.name, *("\n".join(c) for c in cells), good)
    console.print(table)
    by = (
        f"by B at A = {c.shared_a:g}"
        if c.shared_a is not None
        else (f"by A; runs whose A agree within {c.margin:g} by B at their mean A")
    )
    console.print(f"[dim]ranked {by}; compute in {c.entries[0].fit.unit}[/]")
    for p in c.pairs:
        line = f"[bold]{p.better}[/] over [bold]{p.other}[/]: A {spread(p.difference, '+.3f')}, "
        line += f"P(more than {c.margin:g}) = {p.beyond_margin:.2f}; {p.verdict}"
        if p.overtakes is not None:
            line += (
                f"; overtakes at {spread(p.overtakes, 'amount')} (P {p.overtake_probability:.2f})"
            )
        console.print(line)


def print_forecast(p: "Forecast") -> None:
    """Targets and gains."""
    f = p.fit
    console, table = _table("compute", "gain", f"gain per {f.unit}")
    for g in p.gains:
        row = (amount(g.compute), spread(g.gain, "+.4f"), spread(g.per_unit, ".3g"))
        table.add_row(*row)
    console.print(f"[bold]{f}[/]")
    console.print(
        f"at {amount(p.now)} {f.unit}: {spread(p.slope, '.3g')} per further unit of compute, "
        f"{spread(p.remaining)} left to gain"
    )
    console.print(table)
    for t in p.targets:
        within = "" if t.within is None else f", within the budget P = {t.within:.2f}"
        console.print(
            f"[bold]{t.target:g}[/]: {spread(t.compute, 'amount')} {f.unit}{within}; {t.verdict}"
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
