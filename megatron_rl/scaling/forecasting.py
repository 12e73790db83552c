"""What more compute buys: compute for a target, gain per further unit, and when to stop.

All probabilities come from curves drawn by their weight (`Fit.draws`); a run-to-run margin widens
them by a common shift of A when it is given.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .curve import Array
from .errors import DataError
from .fitting import Fit, Interval

At = Callable[[float], Array]
Summary = Callable[[float, Array], Interval]
Draws = tuple[Array, Array, Array, Array]
DRAWS = 8000
STOP_BELOW = 0.05
"""A run whose probability of reaching the target is under this should stop."""


@dataclass(frozen=True, slots=True)
class Target:
    """One target pass rate."""

    target: float
    compute: Interval
    """Compute needed; inf where the curve, or more than the tail of the draws, never gets there."""
    probability: float
    """Probability that the run passes the target with any amount of compute (A > target)."""
    within: float | None
    """Probability that it does within the budget, if one was given."""
    verdict: str


@dataclass(frozen=True, slots=True)
class Gain:
    """Gain from the last evaluation to `compute`."""

    compute: float
    gain: Interval
    """Difference of the expected pass rate."""
    per_unit: Interval
    """Gain per unit of compute, averaged over the step."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Answers for one fit."""

    fit: Fit
    now: float
    """Compute of the last evaluation."""
    slope: Interval
    """Gain per further unit of compute at `now`."""
    remaining: Interval
    """A minus the curve at `now`: what is left to gain."""
    targets: tuple[Target, ...]
    gains: tuple[Gain, ...]


def forecast(
    f: Fit,
    targets: tuple[float, ...] = (),
    budget: float | None = None,
    run_margin: float | None = None,
) -> Forecast:
    """What further compute buys a fitted run.

    Args:
        f: the fit.
        targets: pass rates to reach.
        budget: total compute that may be spent, in the fit's unit.
        run_margin: run-to-run spread of A (two standard deviations); None takes the fit's own.

    Raises:
        DataError: a target outside (0, 1), or a budget that is already spent.
    """
    now = float(f.series.compute[-1])
    bad = [t for t in targets if not 0 < t < 1]
    if bad:
        raise DataError(f"target {bad[0]:g} is no pass rate", "Give fractions between 0 and 1")
    if budget is not None and budget <= now:
        raise DataError(
            f"the budget {budget:g} is already spent ({now:g} {f.unit})",
            "Give the total compute, counted from the start of the run",
        )
    margin = f.run_margin if run_margin is None else run_margin
    a, r0, u, v = f.draws(DRAWS)
    if margin > 0:
        shift = np.random.default_rng(9).normal(0, margin / 2, DRAWS)
        a = np.clip(a + shift, r0, f.a_max)
    shape = f._problem.shape

    def at(compute: float) -> Array:
        return r0 + (a - r0) * shape.g(shape.x(np.array([compute])), u, v)

    def summary(value: float, draws: Array) -> Interval:
        tail = (1 - f.level) / 2
        low, high = np.quantile(draws, [tail, 1 - tail], method="inverted_cdf")
        return Interval(value, min(float(low), value), max(float(high), value))

    step = now * 1e-3
    slope = float((f.curve(now + step) - f.curve(now)) / step)
    return Forecast(
        f,
        now,
        summary(slope, (at(now + step) - at(now)) / step),
        summary(f.A.value - float(f.curve(now)), a - at(now)),
        tuple(_target(f, t, budget, (a, r0, u, v), summary) for t in targets),
        tuple(_gain(f, now, c, at, summary) for c in _steps(now, budget)),
    )


def _steps(now: float, budget: float | None) -> tuple[float, ...]:
    return (1.25 * now, 1.5 * now, 2 * now, 4 * now) + (() if budget is None else (budget,))


def _gain(f: Fit, now: float, c: float, at: At, summary: Summary) -> Gain:
    gain = float(f.curve(c) - f.curve(now))
    draws = at(c) - at(now)
    extra = c - now
    return Gain(c, summary(gain, draws), summary(gain / extra, draws / extra))


def _target(f: Fit, target: float, budget: float | None, draws: Draws, summary: Summary) -> Target:
    a, r0, u, v = draws
    shape, q = f._problem.shape, f._point

    def needed(a: Array, r0: Array, u: Array, v: Array) -> Array:
        gain = np.maximum(a - r0, 1e-12)
        return shape.invert((target - r0) / gain, u, v)

    one = needed(np.array([q.a]), np.array([q.r0]), np.array([q.u]), np.array([q.v]))[0]
    all_ = needed(a, r0, u, v)
    probability = float(np.mean(a > target))
    within = None if budget is None else float(np.mean(all_ <= budget))
    text = f"P(pass {target:g}) = {probability:.2f}"
    if probability < STOP_BELOW:
        verdict = f"stop: this run cannot pass {target:g} ({text})"
    elif within is not None and within < STOP_BELOW:
        verdict = f"stop: not within {budget:g} {f.unit} (P = {within:.2f}; ever: {text})"
    elif probability > 1 - STOP_BELOW:
        verdict = f"goes on: it will pass {target:g} ({text})"
    else:
        verdict = f"open ({text}): another evaluation tells more"
    return Target(target, summary(float(one), all_), probability, within, verdict)
