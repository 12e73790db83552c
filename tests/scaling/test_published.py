"""Fits of the published points, with R0 and window of the paper."""

import time
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.scaling import PointsError, fit, log_sigmoid, read
from megatron_rl.scaling.options import FitOptions
from megatron_rl.scaling.paper_points import published as lookup
from megatron_rl.scaling.paper_points import published_table
from megatron_rl.scaling.solve import solve, solve_paper
from megatron_rl.scaling.window import choose_window, make_problem
from tests.scaling.points import R0, SKIP, published


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("baseline_dapo_pipelinerl8", (0.515, 0.525), (4.3, 4.8)),
        ("gspo", (0.585, 0.595), (1.7, 1.9)),
        ("cispo_eps5", (0.590, 0.600), (0.1, 20)),
        ("scalerl_8b_bs768_14k", (0.595, 0.615), (0.1, 20)),
    ],
)
def test_published_series_give_the_papers_parameters(name, a, b):
    f = fit(published(name), r0=R0, skip=SKIP)
    assert a[0] <= f.A.value <= a[1]
    assert b[0] <= f.B.value <= b[1]
    assert f.A.low <= f.A.value <= f.A.high


def test_batch_2048_gives_its_asymptote_from_half_of_the_run():
    f = fit(published("scalerl_bs2048+"), r0=R0, skip=1500, fit_until=50_000)
    assert 0.630 <= f.A.value <= 0.650


def test_power_law_is_at_its_bound_early_and_settles_late():
    s = published("scalerl_bs2048+")
    early = fit(s, form="power-law", skip=1500, fit_until=50_000)
    assert early.least_squares.a == pytest.approx(1.0, abs=1e-3)
    assert "a_at_bound" in {w.code for w in early.warnings}
    late = fit(s, form="power-law", skip=5000, fit_until=50_000)
    assert 0.71 <= late.least_squares.a <= 0.74
    assert late.Cmid is None
    assert late.D is not None


@pytest.mark.parametrize(
    ("name", "until", "rmse"),
    [
        ("scalerl_8b_bs768_14k+", 8000, 0.004),
        ("scalerl_bs512+", 8000, 0.004),
        ("scalerl_bs2048+", 50_000, 0.006),
    ],
)
@pytest.mark.parametrize("skip", [None, SKIP])
def test_early_part_predicts_the_rest(name, until, rmse, skip):
    p = fit(published(name), r0=R0, skip=skip, fit_until=until).prediction
    assert p.rmse < rmse
    assert p.coverage >= 0.85


@pytest.mark.parametrize("name", ["scalerl_32k", "cispo_eps4"])
def test_data_that_end_too_early_are_called_ill_conditioned(name):
    f = fit(published(name), r0=R0, skip=SKIP)
    assert not f.well_conditioned
    assert f.A.high - f.A.low > 0.1
    # The published asymptotes (.645 and .595-.605) are not excluded by more than the margin.
    assert f.A.low < 0.645 if name == "scalerl_32k" else f.A.low < 0.610


def test_32k_warns_that_the_data_end_before_cmid():
    codes = {w.code for w in fit(published("scalerl_32k"), r0=R0, skip=SKIP).warnings}
    assert {"ends_before_cmid", "wide_a"} <= codes


def test_b_at_the_shared_asymptote_is_the_leave_one_out_value():
    f = fit(published("scalerl_8b_bs768_14k"), r0=R0, skip=SKIP, fix_a=0.605)
    assert 1.9 <= f.B.value <= 2.2
    assert f.A.fixed
    assert f.A.low == f.A.high == 0.605


def test_default_is_faster_than_the_papers_grid_at_no_larger_error():
    s = published("pipeline4")
    options = FitOptions(r0=R0, skip=SKIP)
    w = choose_window(s, options)
    p = make_problem(s.take(w.used), options, w.r0)
    solve(p)
    start = time.process_time()
    fast = solve(p)
    middle = time.process_time()
    slow = solve_paper(p, options)
    end = time.process_time()
    assert fast.s <= slow.s
    assert end - middle > 50 * (middle - start)


def test_one_fit_with_intervals_takes_under_a_second():
    s = published("scalerl_8b_bs768_14k")
    start = time.process_time()
    fit(s, r0=R0)
    assert time.process_time() - start < 1.0


def test_paper_method_stays_on_its_grid():
    f = fit(published("pipeline4"), r0=R0, skip=SKIP, method="paper", fix_a=0.535)
    assert f.A.value == 0.535
    free = fit(published("pipeline4"), r0=R0, skip=SKIP, fix_a=0.535)
    assert free.sse <= f.sse
    assert f.B.value == pytest.approx(free.B.value, rel=0.05)


def test_range_of_the_papers_grid_can_be_given_and_its_edge_is_a_warning():
    s = published("scalerl_8b_bs768_14k")
    f = fit(s, r0=0.40, skip=1450, method="paper", cmid_range=(100, 40_000))
    # 100 linear values from 100 to 40,000 are 403 apart; an own script of the procedure gives this.
    assert (f.A.value, f.Cmid.value) == (0.605, pytest.approx(2518, abs=1))
    assert f.B.value == pytest.approx(2.099, abs=0.002)
    assert "a_at_bound" not in {w.code for w in f.warnings}
    for name, options in (("scalerl_32k", {}), ("gspo", {"a_range": (0.45, 0.55)})):
        f = fit(published(name), r0=R0, skip=SKIP, method="paper", **options)
        assert "a_at_bound" in {w.code for w in f.warnings if w.serious}
        assert f.least_squares.a == options.get("a_range", (0, 0.8))[1]


def test_table_1_and_points_are_installed_with_the_package():
    table = published_table()
    assert len(table) == 10
    for name, row in table.items():
        if not row["series"]:
            with pytest.raises(PointsError, match="no published points"):
                lookup(name)
            continue
        run = lookup(name)
        p = run.parameters
        assert (p["A"], p["B"], p["Cmid"]) == tuple(float(row[k]) for k in ("A", "B", "Cmid"))
        # Its curve passes through the points that were read off.
        error = log_sigmoid(run.points.compute, **p) - run.points.reward
        assert np.sqrt(np.mean(error**2)) < 0.008
        assert p["R0"] == pytest.approx(0.395, abs=0.02)
    assert lookup("gspo").parameters is None
    assert [s.name for s in read("published:scalerl")] == ["scalerl"]
    with pytest.raises(PointsError, match="in GPU-hours, the fit is in tokens"):
        lookup("scalerl", "tokens")
    assert "scaling/*.csv" in (Path(__file__).parents[2] / "setup.py").read_text()
