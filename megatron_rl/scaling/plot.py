"""Static pictures: one fit on a logarithmic and a linear axis, runs against each other, and the
leave-one-out transform. PNG, SVG or PDF by the ending of the path; needs no display.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .comparison import Comparison, transform
from .curve import Array
from .errors import DataError, MissingExtra
from .report import amount, b_spec, roles, spread

if TYPE_CHECKING:
    from .fitting import Fit

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
HELD_OUT, SKIPPED, INK = "#ea580c", "#9ca3af", "#1f2937"
ENDINGS = (".png", ".svg", ".pdf")


def save_plot(f: "Fit", path: str | Path) -> None:
    """Draw a fit on logarithmic and linear compute: points by their part, curve, band, A and Cmid.

    Raises:
        DataError: the ending is none of .png, .svg, .pdf.
        MissingExtra: matplotlib is not installed.
    """
    figure = _figure(path, (12, 4.8))
    axes = figure.subplots(1, 2, sharey=True)
    for axis, log in zip(axes, (True, False), strict=True):
        _draw(axis, f, log)
    axes[0].set_ylabel("pass rate")
    axes[1].tick_params(labelleft=True)
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 7), frameon=False
    )
    figure.suptitle(title(f), fontsize=11, color=INK)
    if not f.well_conditioned:
        codes = ", ".join(w.code for w in f.warnings if w.serious)
        axes[0].set_title(f"ill-conditioned: {codes}", fontsize=9, color="#b91c1c", loc="left")
    figure.savefig(path, dpi=150)


def save_panels(fits: Sequence["Fit"], path: str | Path) -> None:
    """Draw fits beside each other on logarithmic compute, one panel and title each.

    Raises:
        DataError: the ending is none of .png, .svg, .pdf.
        MissingExtra: matplotlib is not installed.
    """
    figure = _figure(path, (6 * len(fits), 4.8))
    axes = figure.subplots(1, len(fits), squeeze=False, sharey=True)[0]
    shown = []
    for axis, f in zip(axes, fits, strict=True):
        _draw(axis, f, True)
        shown.append(axis.get_ylim())
        axis.set_title(title(f).replace(":  ", "\n", 1), fontsize=9, color=INK)
    axes[0].set_ylim(min(low for low, _ in shown), max(high for _, high in shown))
    axes[0].set_ylabel("pass rate")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 7), frameon=False
    )
    figure.savefig(path, dpi=150)


def save_comparison(c: Comparison, path: str | Path) -> None:
    """Draw the curves of all runs, and the leave-one-out transform beside them.

    With a shared A the transform uses each run's refit at it, so that slopes are comparable.
    """
    figure = _figure(path, (12, 5.2))
    left, right = figure.subplots(1, 2)
    for i, entry in enumerate(c.entries):
        f, color = entry.fit, COLORS[i % len(COLORS)]
        x = axis_values(f, True)
        used = f.window.used
        left.plot(
            f.series.compute[used], f.series.reward[used], "o", ms=3.5, color=color, alpha=0.7
        )
        left.plot(
            x, f.curve(x), color=color, lw=1.8, label=f"{entry.rank}. {entry.name}  A {spread(f.A)}"
        )
        low, high = f.band(x, kind="curve")
        left.fill_between(x, low, high, color=color, alpha=0.10, lw=0)
        _transform_line(right, entry.shared or f, color, entry.name)
    left.set_xscale("log")
    left.set_ylabel("pass rate")
    left.set_xlabel(f"compute ({c.entries[0].fit.unit})")
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel(f"compute ({c.entries[0].fit.unit})")
    right.set_ylabel(r"$F(R) / C_{mid}^{\,B} = 1 / \left(\frac{A-R_0}{R-R_0} - 1\right)$")
    right.set_title("leave-one-out transform: slope B", fontsize=10, color=INK)
    for axis in (left, right):
        _tidy(axis)
        axis.legend(fontsize=7.5, frameon=False)
    figure.savefig(path, dpi=150)


def title(f: "Fit") -> str:
    """Name and parameters in one line."""
    parts = [f"{f.name or 'fit'}:  A {spread(f.A)}", f"B {spread(f.B, b_spec(f))}"]
    if f.Cmid is not None:
        parts.append(f"Cmid {spread(f.Cmid, ',.4g')}")
    return ",  ".join(parts)


def axis_values(f: "Fit", log: bool, points: int = 240) -> Array:
    """Computes at which curve and band are drawn: the data, and a quarter of a decade beyond."""
    c = f.series.compute
    positive = c[c > 0]
    top = float(c[-1]) * 1.6
    if log:
        return np.geomspace(float(positive[0]) * 0.8, top, points)
    start = 0.0 if f.form != "power-law" else float(positive[0]) * 0.5
    return np.linspace(start, top, points)


def _draw(axis: Any, f: "Fit", log: bool) -> None:
    color = COLORS[0]
    x = axis_values(f, log)
    low, high = f.band(x)
    inner_low, inner_high = f.band(x, kind="curve")
    axis.fill_between(
        x, low, high, color=color, alpha=0.10, lw=0, label=f"{f.level:.0%} evaluations"
    )
    axis.fill_between(
        x, inner_low, inner_high, color=color, alpha=0.20, lw=0, label=f"{f.level:.0%} curve"
    )
    axis.plot(x, f.curve(x), color=color, lw=2, label="least squares")
    axis.plot(x, f.predict(x), color=INK, lw=1.2, ls=(0, (4, 2)), label="expected")
    part = np.array(roles(f))
    c, r, s = f.series.compute, f.series.reward, f.series.stderr
    styles = (
        ("used", {"marker": "o", "color": color, "ms": 5, "mec": "white", "mew": 0.6}, "fitted"),
        ("skipped", {"marker": "o", "mfc": "none", "color": SKIPPED, "ms": 5}, "skipped"),
        ("r0", {"marker": "s", "mfc": "none", "color": INK, "ms": 5}, "R0"),
        (
            "held_out",
            {"marker": "D", "mfc": "white", "color": HELD_OUT, "ms": 5, "mew": 1.4},
            "held out",
        ),
    )
    for role, style, label in styles:
        mask = (part == role) & ((c > 0) | (not log))
        if mask.any():
            yerr = None if s is None else s[mask]
            axis.errorbar(
                c[mask], r[mask], yerr=yerr, ls="none", elinewidth=0.8, zorder=5,
                label=f"{label} ({int((part == role).sum())})", **style,
            )  # fmt: skip
    axis.axhline(f.A.value, color=INK, lw=0.9, ls=":")
    axis.axhspan(f.A.low, f.A.high, color=INK, alpha=0.05, lw=0)
    axis.annotate(
        f"A = {f.A.value:.3f}", (0.02, f.A.value), xycoords=("axes fraction", "data"),
        xytext=(0, 3), textcoords="offset points", fontsize=9, color=INK,
    )  # fmt: skip
    if f.Cmid is not None and x[0] < f.Cmid.value < x[-1]:
        at = float(f.curve(f.Cmid.value))
        axis.axvline(f.Cmid.value, color=INK, lw=0.9, ls=":")
        axis.plot([f.Cmid.value], [at], "s", color=INK, ms=5, zorder=6)
        axis.annotate(
            f"Cmid = {amount(f.Cmid.value)}", (f.Cmid.value, 0.03), fontsize=9, color=INK,
            xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points",
        )  # fmt: skip
    if f.fit_until is not None and x[0] < f.fit_until < x[-1]:
        axis.axvline(f.fit_until, color=HELD_OUT, lw=1, ls="--")
    if log:
        axis.set_xscale("log")
    axis.set_xlim(x[0] if log else -0.02 * x[-1], x[-1])
    # The curve before the data may fall far below them: the power law has no floor.
    shown = np.concatenate([r, f.curve(c[c > 0][:1]), [f.A.value]])
    span = float(shown.max() - shown.min())
    axis.set_ylim(float(shown.min()) - 0.08 * span, max(float(shown.max()), 0) + 0.12 * span)
    axis.set_xlabel(f"compute ({f.unit}), {'logarithmic' if log else 'linear'}")
    _tidy(axis)


def _transform_line(axis: Any, f: "Fit", color: str, name: str) -> None:
    if f.Cmid is None:
        return
    c, value = transform(f)
    odds = value / f.Cmid.value**f.B.value
    axis.plot(c, odds, "o", ms=3.5, color=color, alpha=0.8)
    x = np.geomspace(float(c.min()), float(c.max()), 2) if len(c) else np.array([1.0, 2.0])
    axis.plot(
        x,
        (x / f.Cmid.value) ** f.B.value,
        color=color,
        lw=1.5,
        label=f"{name}  B {spread(f.B, '.2f')}",
    )


def _tidy(axis: Any) -> None:
    axis.grid(True, which="major", color="#e5e7eb", lw=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if axis.get_xscale() == "log":
        low, high = axis.get_xlim()
        wide = np.log10(high / low) > 2
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: compact(v)))


def compact(value: float) -> str:
    """Compute in few characters: 500, 2k, 1.5M, 2e+13."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < size * 1000:
            return f"{value / size:g}{letter}"
    return f"{value:g}" if abs(value) < 1e12 else f"{value:.3g}"


def _figure(path: str | Path, size: Sequence[float]) -> Any:
    if Path(path).suffix.lower() not in ENDINGS:
        raise DataError(f"cannot draw '{path}'", f"Choose a path that ends in {', '.join(ENDINGS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "Drawing a plot", "plot") from error
    return Figure(figsize=(size[0], size[1]), layout="constrained", facecolor="white")
