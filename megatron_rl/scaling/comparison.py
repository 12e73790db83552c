"""Ranking of runs: by A if A differs by more than the margin, else by B at a shared A.

The paper's rule (arXiv 2510.13786, section 3): three repeats of one run moved A by up to 0.015, so
runs whose A agree within 0.02 are refitted at their mean A and ranked by B. The transform of its
leave-one-out figures, ``F(R) = 1 / ((A - R0)/(R - R0) - 1) * Cmid^B = C^B``, makes each run a line
of slope B in log F against log C.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from .curve import Array
from .errors import PointsError
from .fit_result import Fit, Interval
from .fitting import fit_series
from .likelihood import Curves

MARGIN = 0.02  # differences of A up to this count as none
DRAWS = 4000
OVERTAKE_DRAWS = 500


@dataclass(frozen=True, slots=True)
class Entry:
    """One run in the ranking."""

    rank: int
    fit: Fit
    shared: Fit | None  # refit at the shared A of its group, None if no other run agrees in A


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs of the ranking, `better` above `other`."""

    better: str
    other: str
    difference: Interval  # A of `better` minus A of `other`
    beyond_margin: float  # probability that A of `better` is higher by more than the margin
    verdict: str
    # Compute beyond which `better` stays ahead, if it is behind before: of the draws with one.
    overtakes: Interval | None
    overtake_probability: float  # that it is behind at first and overtakes within 100x the data


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs from best to worst, and each run against the next."""

    entries: tuple[Entry, ...]
    pairs: tuple[Pair, ...]
    margin: float
    shared_a: float | None  # A at which all runs were refitted


def compare(
    fits: Sequence[Fit], margin: float = MARGIN, shared_a: float | Literal["mean"] | None = None
) -> Comparison:
    """Rank at least two fits of one sigmoid form in one unit of compute.

    Differences of A up to `margin` count as none. With `shared_a` every run is refitted at this A,
    or at the mean A of all, and ranked by B (leave-one-out tables). Device-hours of a run count as
    GPU-hours if another's are GPU-hours, which its repairs state.

    Raises:
        PointsError: fewer than two fits, or units or forms that differ.
    """
    if len(fits) < 2:
        raise PointsError(f"{len(fits)} series to compare", "Give at least two files or series")
    units, forms = {f.unit for f in fits}, {f.options.form for f in fits}
    if units == {"device-hours", "GPU-hours"}:
        fits = [_in_gpu_hours(f) for f in fits]
    elif len(units) > 1:
        remedy = "Choose one with --compute-column or --compute-unit; --devices N makes GPU-hours "
        remedy += "of the hours of a clock"
        raise PointsError(f"units of compute differ: {', '.join(sorted(units))}", remedy)
    if len(forms) > 1 or "power-law" in forms:
        raise PointsError("the runs are not fitted by one sigmoid form", "Use one sigmoid --form")
    if shared_a == "mean":
        shared_a = float(np.mean([f.A.value for f in fits]))
    ranked = _rank(fits, margin) if shared_a is None else _rank_by_b(fits, shared_a)
    entries = [Entry(i, *pair) for i, pair in enumerate(ranked, start=1)]
    pairs = [_compare_pair(a.fit, b.fit, margin) for a, b in pairwise(entries)]
    return Comparison(tuple(entries), tuple(pairs), margin, shared_a)


def _in_gpu_hours(f: Fit) -> Fit:
    note = "device-hours count as GPU-hours: a device is a GPU"
    repairs = f.series.repairs if f.unit == "GPU-hours" else (*f.series.repairs, note)
    return replace(f, series=replace(f.series, unit="GPU-hours", repairs=repairs))


def transform(f: Fit) -> tuple[Array, Array]:
    """Return compute and F(R) of the leave-one-out plot, for rewards strictly inside (R0, A)."""
    if f.R0 is None or f.Cmid is None:
        raise PointsError("the power law has no leave-one-out transform", "Use a sigmoid form")
    c, r = f.series.compute[f.window.used], f.series.reward[f.window.used]
    a, r0 = f.A.value, f.R0.value
    inside = (r > r0) & (r < a) & (c > 0)
    odds = 1 / ((a - r0) / (r[inside] - r0) - 1)
    return c[inside], odds * f.Cmid.value**f.B.value


def _rank_by_b(fits: Sequence[Fit], shared_a: float) -> list[tuple[Fit, Fit]]:
    """Rank fits by B at a shared A; returns fits and refits of the same points."""

    def refit(f: Fit) -> Fit:
        fixed = replace(f.options, fix_a=shared_a, method="fast", run_margin=0.0)
        return fit_series(f.series, replace(fixed, skip=f.window.skip, skip_epochs=None))

    return sorted(((f, refit(f)) for f in fits), key=lambda pair: -pair[1].B.value)


def _rank(fits: Sequence[Fit], margin: float) -> list[tuple[Fit, Fit | None]]:
    """Rank groups by A, and the runs of a group by B at their mean A."""
    ordered = sorted(fits, key=lambda f: -f.A.value)
    ranked: list[tuple[Fit, Fit | None]] = []
    while ordered:
        top = ordered[0].A.value
        group = [f for f in ordered if top - f.A.value <= margin]
        ordered = ordered[len(group) :]
        mean = float(np.mean([f.A.value for f in group]))
        ranked += [(group[0], None)] if len(group) == 1 else _rank_by_b(group, mean)
    return ranked


def _compare_pair(f: Fit, g: Fit, margin: float) -> Pair:
    """Compare A of two runs, and find where the curve of the first overtakes the second's."""
    level = f.options.level
    one, two = f.models.draw(DRAWS, seed=1), g.models.draw(DRAWS, seed=2)
    d = np.random.default_rng(3).permuted(one.a) - two.a
    difference = Interval.of_draws(f.A.value - g.A.value, d, level)
    low, high = np.quantile(d, [(1 - level) / 2, 1 - (1 - level) / 2])
    if low > margin:
        verdict = f"A is higher by more than the margin {margin:.3g}"
    elif high < -margin:
        verdict = f"A is lower by more than the margin {margin:.3g}"
    elif max(abs(low), abs(high)) <= margin:
        verdict = f"A agrees within the margin {margin:.3g}"
    else:
        verdict = f"undecided: the data allow differences on both sides of the margin {margin:.3g}"
    positive = [s.compute[s.compute > 0] for s in (f.series, g.series)]
    first, last = min(c[0] for c in positive), max(c[-1] for c in positive)
    c = np.geomspace(first, last * 100, 800)
    y1 = Curves(*np.array(one)[:, :OVERTAKE_DRAWS]).at(c, f.problem.shape)
    y2 = Curves(*np.array(two)[:, :OVERTAKE_DRAWS]).at(c, g.problem.shape)
    crossings = _overtakes(c, y1 - y2)
    happens = np.isfinite(crossings)
    best, overtakes = float(_overtakes(c, (f.curve(c) - g.curve(c))[None])[0]), None
    if np.isfinite(best) and happens.any():
        overtakes = Interval.of_draws(best, crossings[happens], level)
    beyond, overtaking = float(np.mean(d > margin)), float(np.mean(happens))
    return Pair(f.name, g.name, difference, beyond, verdict, overtakes, overtaking)


def _overtakes(c: Array, lead: Array) -> Array:
    """Return the last compute at which the lead turns positive [k]; nan if it does not."""
    ahead = lead > 0
    turns = ahead[:, 1:] & ~ahead[:, :-1]
    last = turns.shape[1] - 1 - np.argmax(turns[:, ::-1], axis=1)
    rows = np.arange(len(lead))
    left, right = lead[rows, last], lead[rows, last + 1]
    share = np.divide(-left, right - left, out=np.zeros_like(left), where=right > left).clip(0, 1)
    at = np.exp(np.log(c[last]) + share * np.log(c[last + 1] / c[last]))
    return np.where(turns.any(axis=1) & ahead[:, -1], at, np.nan)
