"""Ranking of runs, shared asymptotes, crossings, and forecasts of further compute."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.scaling import PointsError, Series, compare, fit, forecast, log_sigmoid
from megatron_rl.scaling.comparison import transform
from tests.scaling.points import R0, SKIP, published

HOURS = [5e3, 1e4, 2e4, 4e4, 6e4, 8e4, 1e5]
METHODS = {
    "Magistral": [0.17, 0.26, 0.34, 0.40, 0.45, 0.48, 0.49],
    "GRPO": [0.19, 0.28, 0.36, 0.43, 0.48, 0.51, 0.52],
    "DAPO": [0.21, 0.30, 0.39, 0.46, 0.51, 0.53, 0.54],
    "MiniMax": [0.23, 0.33, 0.42, 0.49, 0.54, 0.57, 0.58],
    "ScaleRL": [0.25, 0.35, 0.44, 0.52, 0.57, 0.60, 0.61],
}


def fitted(a, b, cmid, name, r0=0.2, sigma=0.002, seed=0, end=5.0):
    c = np.linspace(end / 24, end, 24) * 1000.0
    noise = sigma * np.random.default_rng(seed).normal(size=24)
    y = log_sigmoid(c, a, b, cmid, r0) + noise
    return fit(Series.clean(c, y, name=name, unit="GPU-hours"), r0=r0, skip=0)


@pytest.mark.parametrize("r0", [0.0, 0.1])
def test_seven_point_methods_are_ranked_in_the_printed_order(r0):
    fits = [fit(Series.clean(HOURS, y, name=name), r0=r0) for name, y in METHODS.items()]
    result = compare(fits)
    names = [e.fit.name for e in result.entries]
    assert names == ["ScaleRL", "MiniMax", "DAPO", "GRPO", "Magistral"]
    assert all(e.fit.A.low < e.fit.A.value < e.fit.A.high for e in result.entries)


def test_seven_points_after_the_start_decide_nothing_without_r0():
    result = compare([fit(Series.clean(HOURS, y, name=name)) for name, y in METHODS.items()])
    assert result.entries[0].fit.name == "ScaleRL"
    codes = [{w.code for w in e.fit.warnings if w.serious} for e in result.entries]
    assert all("wide_a" in c for c in codes)
    assert sum("r0_unknown" in c for c in codes) >= 3
    assert all(p.verdict.startswith("undecided") for p in result.pairs)


def test_runs_that_agree_in_a_are_ranked_by_b_at_their_mean():
    slow, quick = fitted(0.61, 1.5, 900, "slow"), fitted(0.60, 2.5, 900, "quick", seed=1)
    result = compare([slow, quick])
    assert [e.fit.name for e in result.entries] == ["quick", "slow"]
    mean = (slow.A.value + quick.A.value) / 2
    assert [e.shared.A.value for e in result.entries] == pytest.approx([mean, mean])
    assert "agrees" in result.pairs[0].verdict or "undecided" in result.pairs[0].verdict


def test_difference_beyond_the_margin_is_in_the_verdict():
    result = compare([fitted(0.5, 2, 900, "low"), fitted(0.7, 2, 900, "high", seed=1)])
    pair = result.pairs[0]
    assert (pair.better, pair.other) == ("high", "low")
    assert "more than the margin" in pair.verdict
    assert pair.beyond_margin > 0.99
    assert pair.difference.low < 0.2 < pair.difference.high


def test_crossing_of_two_runs_is_located():
    # The better run is behind at first: it overtakes where the two curves are equal.
    better, early = fitted(0.7, 2, 2000, "better", end=8), fitted(0.5, 2, 500, "early", seed=1)
    c = np.linspace(300, 8000, 10_000)
    lead = log_sigmoid(c, 0.7, 2, 2000, 0.2) - log_sigmoid(c, 0.5, 2, 500, 0.2)
    truth = c[np.argmax(lead > 0)]
    pair = compare([better, early]).pairs[0]
    assert pair.overtakes.value == pytest.approx(truth, rel=0.05)
    assert pair.overtakes.low <= truth <= pair.overtakes.high
    assert pair.overtake_probability > 0.95


def test_shared_a_ranks_by_b_alone():
    fits = [fit(published(n), r0=R0, skip=SKIP) for n in ("fp32", "scalerl_8b_bs768_14k")]
    result = compare(fits, shared_a=0.605)
    assert [e.fit.name for e in result.entries] == ["scalerl_8b_bs768_14k", "fp32"]
    assert 1.9 <= result.entries[0].shared.B.value <= 2.2


def test_leave_one_out_transform_is_a_line_of_slope_b():
    f = fitted(0.6, 2.2, 900, "run", sigma=0)
    c, value = transform(f)
    slope, intercept = np.polyfit(np.log(c), np.log(value), 1)
    assert slope == pytest.approx(2.2, rel=1e-2)
    # F(R) = C^B: no offset.
    assert intercept == pytest.approx(0.0, abs=0.1)


def test_units_that_differ_are_not_compared():
    one, two = fitted(0.6, 2, 900, "a"), fitted(0.6, 2, 900, "b")
    other = fit(Series.clean(two.series.compute, two.series.reward, unit="tokens"), r0=0.2)
    with pytest.raises(PointsError, match="units of compute differ"):
        compare([one, other])
    with pytest.raises(PointsError, match="at least two"):
        compare([one])


def test_compute_for_a_target_covers_the_truth():
    f = fitted(0.6, 2, 1000, "run", end=4)
    # R = .5 of a curve from .2 to .6 is 3/4 of the gain: C = Cmid * 3^(1/2).
    p = forecast(f, (0.5, 0.7), budget=10_000)
    near, far = p.targets
    assert near.compute.low <= 1000 * np.sqrt(3) <= near.compute.high
    assert near.compute.value == pytest.approx(1000 * np.sqrt(3), rel=0.03)
    assert near.probability == 1.0
    assert far.compute.value == np.inf
    assert far.probability < 0.05
    assert far.verdict.startswith("stop: this run cannot pass 0.7")


def test_gain_per_further_unit_covers_the_truth_and_falls():
    f = fitted(0.6, 2, 1000, "run", end=4)
    p = forecast(f)
    h = 1.0
    truth = (log_sigmoid(4000 + h, 0.6, 2, 1000, 0.2) - log_sigmoid(4000, 0.6, 2, 1000, 0.2)) / h
    assert p.slope.low <= truth <= p.slope.high
    rates = [g.per_unit.value for g in p.gains[:4]]
    assert rates == sorted(rates, reverse=True)


def test_run_margin_makes_a_forecast_less_sure():
    f = fitted(0.6, 2, 1000, "run", end=6)
    wider = replace(f, options=replace(f.options, run_margin=0.02))
    sure, unsure = forecast(f, (0.59,)), forecast(wider, (0.59,))
    assert unsure.targets[0].probability < sure.targets[0].probability


def test_spent_budget_is_refused():
    with pytest.raises(PointsError, match="already spent"):
        forecast(fitted(0.6, 2, 1000, "run"), (0.5,), budget=10)
