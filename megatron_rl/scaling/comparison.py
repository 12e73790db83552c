"""Which run is better: by A where A differs by more than the margin, by B at a shared A where not.

The paper's rule (arXiv 2510.13786, section 3): three repeats of one run moved A by up to 0.015, so
runs whose A agree within 0.02 are refitted at their mean A and ranked by B. The transform of its
leave-one-out figures, ``F(R) = 1 / ((A - R0)/(R - R0) - 1) * Cmid^B = C^B``, makes each run a line
of slope B in log F against log C.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from .curve import Array
from .errors import DataError
from .fitting import RUN_MARGIN, Fit, Interval, fit
from .series import Series
from .window import R0Choice

DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Entry:
    """One run in the ranking."""

    rank: int
    fit: Fit
    shared: Fit | None
    """Refit at the shared A of its group, None if the run stands alone."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.fit.name


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs of the ranking, `better` above `other`."""

    better: str
    other: str
    difference: Interval
    """A of `better` minus A of `other`."""
    beyond_margin: float
    """Probability that A of `better` exceeds A of `other` by more than the margin."""
    verdict: str
    overtakes: Interval | None
    """Compute beyond which `better` is ahead for good, if it is behind before; its interval covers
    the draws in which it overtakes at all."""
    overtake_probability: float
    """Probability that `better` is behind at first and overtakes within 100 times the data."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs from best to worst, and each run against the next."""

    entries: tuple[Entry, ...]
    pairs: tuple[Pair, ...]
    margin: float
    shared_a: float | None
    """A that was asked for with `shared_a`, if any."""


def compare(
    fits: Sequence[Fit], margin: float = RUN_MARGIN, shared_a: float | None = None
) -> Comparison:
    """Rank fitted runs.

    Args:
        fits: at least two fits of one sigmoid form in one unit of compute.
        margin: differences of A up to this are no differences.
        shared_a: refit every run at this A and rank by B alone (leave-one-out tables).

    Raises:
        DataError: fewer than two fits, or units or forms that differ.
    """
    if len(fits) < 2:
        raise DataError(f"{len(fits)} series to compare", "Give at least two files or series")
    units, forms = {f.unit for f in fits}, {f.form for f in fits}
    if len(units) > 1:
        raise DataError(
            f"units of compute differ: {', '.join(sorted(units))}",
            "Choose one with --compute-column or --compute-unit",
        )
    if len(forms) > 1 or "power-law" in forms:
        raise DataError("the runs are not fitted by one sigmoid form", "Use one sigmoid --form")
    entries = [
        Entry(i, f, s) for i, (f, s) in enumerate(_rank(list(fits), margin, shared_a), start=1)
    ]
    pairs = [_pair(a, b, margin) for a, b in pairwise(entries)]
    return Comparison(tuple(entries), tuple(pairs), margin, shared_a)


def refit(f: Fit, fix_a: float) -> Fit:
    """The same fit with A held."""
    r0: R0Choice = "fit" if f.window.r0 is None else f.window.r0
    return fit(
        _without_r0_point(f),
        r0=r0,
        skip=f.window.skip,
        fit_until=f.fit_until,
        form=f.form,
        fix_a=fix_a,
        a_max=f.a_max,
        level=f.level,
    )


def transform(f: Fit) -> tuple[Array, Array]:
    """Points of the leave-one-out plot: compute and F(R), for rewards strictly inside (R0, A)."""
    if f.R0 is None or f.Cmid is None:
        raise DataError("the power law has no leave-one-out transform", "Use a sigmoid form")
    c, r = f.series.compute[f.window.used], f.series.reward[f.window.used]
    a, r0 = f.A.value, f.R0.value
    inside = (r > r0) & (r < a) & (c > 0)
    odds = 1 / ((a - r0) / (r[inside] - r0) - 1)
    return c[inside], odds * f.Cmid.value**f.B.value


def _without_r0_point(f: Fit) -> Series:
    """The series without the evaluation that R0 was read from, which is no point of the fit."""
    if f.window.r0_at is None:
        return f.series
    s = f.series
    return replace(
        s,
        compute=s.compute[1:],
        reward=s.reward[1:],
        stderr=None if s.stderr is None else s.stderr[1:],
    )


def _rank(fits: list[Fit], margin: float, shared_a: float | None) -> list[tuple[Fit, Fit | None]]:
    """Groups by A, within a group by B at the shared A."""
    if shared_a is not None:
        at_a = sorted(((f, refit(f, shared_a)) for f in fits), key=lambda p: -p[1].B.value)
        return list(at_a)
    ordered = sorted(fits, key=lambda f: -f.A.value)
    ranked: list[tuple[Fit, Fit | None]] = []
    while ordered:
        top = ordered[0].A.value
        group = [f for f in ordered if top - f.A.value <= margin]
        ordered = ordered[len(group) :]
        if len(group) == 1:
            ranked.append((group[0], None))
            continue
        mean = float(np.mean([f.A.value for f in group]))
        refits = sorted(((f, refit(f, mean)) for f in group), key=lambda p: -p[1].B.value)
        ranked += refits
    return ranked


def _pair(one: Entry, two: Entry, margin: float) -> Pair:
    """Difference of A, and where the curve of the better run overtakes the other's."""
    f, g = one.fit, two.fit
    a1, r1, u1, v1 = f.draws(DRAWS, seed=1)
    a2, r2, u2, v2 = g.draws(DRAWS, seed=2)
    d = np.random.default_rng(3).permuted(a1) - a2
    tail = (1 - f.level) / 2
    value = f.A.value - g.A.value
    low, high = (float(q) for q in np.quantile(d, [tail, 1 - tail]))
    difference = Interval(value, min(low, value), max(high, value))
    beyond = float(np.mean(d > margin))
    if low > margin:
        verdict = f"A is higher by more than the margin {margin:g}"
    elif high < -margin:
        verdict = f"A is lower by more than the margin {margin:g}"
    elif max(abs(low), abs(high)) <= margin:
        verdict = f"A agrees within the margin {margin:g}"
    else:
        verdict = f"undecided: the data allow differences on both sides of the margin {margin:g}"
    c = _axis(f, g)
    n = 500
    x1, x2 = f._problem.shape.x(c), g._problem.shape.x(c)
    s1, s2 = f._problem.shape, g._problem.shape
    y1 = r1[:n, None] + (a1 - r1)[:n, None] * s1.g(x1, u1[:n, None], v1[:n, None])
    y2 = r2[:n, None] + (a2 - r2)[:n, None] * s2.g(x2, u2[:n, None], v2[:n, None])
    crossings = _overtakes(c, y1 - y2)
    happens = np.isfinite(crossings)
    best = _overtakes(c, (f.curve(c) - g.curve(c))[None])[0]
    interval = None
    if np.isfinite(best) and happens.any():
        ends = np.quantile(crossings[happens], [tail, 1 - tail])
        interval = Interval(float(best), min(float(ends[0]), best), max(float(ends[1]), best))
    return Pair(one.name, two.name, difference, beyond, verdict, interval, float(np.mean(happens)))


def _axis(f: Fit, g: Fit) -> Array:
    """Computes from the smallest of both series to 100 times the largest, in equal ratios."""
    positive = [s.compute[s.compute > 0] for s in (f.series, g.series)]
    low, high = min(p[0] for p in positive), max(p[-1] for p in positive)
    return np.geomspace(low, high * 100, 800)


def _overtakes(c: Array, lead: Array) -> Array:
    """Last compute at which the lead turns from negative to positive [k]; nan if it does not."""
    ahead = lead > 0
    turns = ahead[:, 1:] & ~ahead[:, :-1]
    last = turns.shape[1] - 1 - np.argmax(turns[:, ::-1], axis=1)
    rows = np.arange(len(lead))
    left, right = lead[rows, last], lead[rows, last + 1]
    share = np.divide(-left, right - left, out=np.zeros_like(left), where=right > left)
    share = np.clip(share, 0, 1)
    at = np.exp(np.log(c[last]) + share * np.log(c[last + 1] / c[last]))
    return np.where(turns.any(axis=1) & ahead[:, -1], at, np.nan)
