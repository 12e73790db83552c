"""The gain from more compute: compute for a target, gain per further unit, and when to stop.

All probabilities come from curves drawn by their weight; the fit's run-to-run margin widens them by
a common shift of A.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .curve import Array
from .errors import PointsError
from .fit_result import Fit, Interval
from .likelihood import Curves

DRAWS = 8000
STOP_BELOW = 0.05  # least probability of reaching the target at which a run should go on


@dataclass(frozen=True, slots=True)
class Target:
    """One target pass rate."""

    target: float
    compute: Interval  # needed; inf if the curve, or more than the tail of the draws, never passes
    probability: float  # that the run passes the target with any amount of compute (A > target)
    within_budget: float | None  # that it does within the budget, if one was given
    verdict: str


@dataclass(frozen=True, slots=True)
class Gain:
    """Gain from the last evaluation to `compute`."""

    compute: float
    gain: Interval  # difference of the expected pass rate
    per_unit: Interval  # gain per unit of compute, averaged over the step


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of one fit."""

    fit: Fit
    now: float  # compute of the last evaluation
    slope: Interval  # gain per further unit of compute at `now`
    remaining: Interval  # A minus the curve at `now`
    targets: tuple[Target, ...]
    gains: tuple[Gain, ...]


def forecast(f: Fit, targets: Sequence[float] = (), budget: float | None = None) -> Forecast:
    """Forecast the gain of a fitted run from further compute.

    `targets` are pass rates, `budget` is the total compute that may be spent, in the fit's unit.

    Raises:
        PointsError: a target outside (0, 1), or a budget that is already spent.
    """
    now = float(f.series.compute[-1])
    for target in targets:
        if not 0 < target < 1:
            raise PointsError(f"target {target:g} is no pass rate", "Give fractions in (0, 1)")
    if budget is not None and budget <= now:
        remedy = "Give the total compute, counted from the start of the run"
        raise PointsError(f"the budget {budget:g} is already spent ({now:g} {f.unit})", remedy)
    curves = f.models.draw(DRAWS)
    if f.options.run_margin > 0:  # two standard deviations
        shift = np.random.default_rng(9).normal(0, f.options.run_margin / 2, DRAWS)
        curves = curves._replace(a=np.clip(curves.a + shift, curves.r0, f.options.a_max))

    def at(compute: float) -> Array:
        return curves.at(np.array([compute]), f.problem.shape)[:, 0]

    def gain(compute: float, extra: float) -> Gain:
        value, draws = float(f.curve(compute) - f.curve(now)), at(compute) - at(now)
        per_unit = _interval(f, value / extra, draws / extra)
        return Gain(compute, _interval(f, value, draws), per_unit)

    slope = gain(now + now * 1e-3, now * 1e-3).per_unit
    remaining = _interval(f, f.A.value - float(f.curve(now)), curves.a - at(now))
    steps = [1.25 * now, 1.5 * now, 2 * now, 4 * now] + ([] if budget is None else [budget])
    gains = tuple(gain(compute, compute - now) for compute in steps)
    reached = tuple(_target(f, target, budget, curves) for target in targets)
    return Forecast(f, now, slope, remaining, reached, gains)


def _interval(f: Fit, value: float, draws: Array) -> Interval:
    # Draws may be infinite: without interpolation.
    return Interval.of_draws(value, draws, f.options.level, "inverted_cdf")


def _target(f: Fit, target: float, budget: float | None, curves: Curves) -> Target:
    q = f.point

    def needed(a: Array, r0: Array, u: Array, v: Array) -> Array:
        return f.problem.shape.invert((target - r0) / np.maximum(a - r0, 1e-12), u, v)

    value, draws = float(needed(*np.array([[q.a], [q.r0], [q.u], [q.v]]))[0]), needed(*curves)
    probability = float(np.mean(curves.a > target))
    within = None if budget is None else float(np.mean(draws <= budget))
    text = f"P(pass {target:g}) = {probability:.2f}"
    if probability < STOP_BELOW:
        verdict = f"stop: this run cannot pass {target:g} ({text})"
    elif within is not None and within < STOP_BELOW:
        verdict = f"stop: not within {budget:g} {f.unit} (P = {within:.2f}; ever: {text})"
    elif probability > 1 - STOP_BELOW:
        verdict = f"continue: it will pass {target:g} ({text})"
    else:
        verdict = f"open ({text}): wait for another evaluation"
    return Target(target, _interval(f, value, draws), probability, within, verdict)
