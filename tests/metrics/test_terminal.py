"""Progress lines: text only, at intervals, with rate and remaining time."""

from __future__ import annotations

import io

import pytest

from megatron_rl.metrics.terminal import ProgressLog

ROW = {
    "kind": "step",
    "reward_mean": 0.125,
    "lag_mean": 3.2,
    "lag_max": 5,
    "trainer_wait_fraction": 0.3,
    "generator_wait_fraction": 0.01,
    "generator_tokens_per_second": 1834.0,
}


def test_a_line_is_printed_at_intervals_and_for_evaluations_and_the_end() -> None:
    stream = io.StringIO()
    progress = ProgressLog(40, interval_seconds=1e6, stream=stream)
    for step in range(40):
        progress.update(ROW | {"step": step})
        if step == 20:
            rates = {"pass_rate": 0.25, "pass_rate_stderr": 0.012}
            tasks = {"sums": {"pass_rate": 0.5}, "lists": {"pass_rate": 0.0}}
            progress.update({"kind": "eval", "step": 20, **rates, "tasks": tasks})
    lines = stream.getvalue().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["step 1/40", "step 21/40", "step 40/40"]
    assert "pass rate 0.250 ±0.012 (sums 0.500, lists 0.000), reward +0.125" in lines[1]
    assert "lag 3.2, max lag 5, trainer waits 30%, generator waits 1%, 1,834 tokens/s" in lines[1]
    assert "\x1b" not in stream.getvalue()


def test_a_note_is_printed_once_between_steps() -> None:
    stream = io.StringIO()
    progress = ProgressLog(40, interval_seconds=1e6, stream=stream)
    for _ in range(2):
        progress.note("evaluating")
        progress.note("evaluating")
        progress.update({"kind": "step", "step": 0})
    assert stream.getvalue().splitlines() == ["evaluating", "step 1/40", "evaluating"]


def test_rate_and_remaining_time_follow_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("megatron_rl.metrics.terminal.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = ProgressLog(100, first_step=50, interval_seconds=0, stream=stream)
    now[0] += 300  # a slow start does not count
    for step in range(50, 60):
        progress.update({"kind": "step", "step": step})
        now[0] += 2.0
    # 9 steps in 18 s between the first and the last update; 40 steps are left.
    assert stream.getvalue().splitlines()[-1] == "step 60/100, 2 s/step, 0:01:20 left"
