"""The checks of the driver see what a run lost, trained twice, or left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import driver
from tests.fleet.faults import MOMENTS, Fault
from tests.fleet.points import RUNS

TOTAL = 5
PROMPTS = [[4 * step + i for i in range(4)] for step in range(TOTAL)]


class Ended:
    """A run that has ended, with these rows."""

    total = TOTAL

    def __init__(self, output: Path) -> None:
        self.output = output
        self.rows: list[dict[str, Any]] = [{"kind": "eval", "step": step} for step in (0, TOTAL)]
        for step in range(TOTAL):
            row = {"kind": "step", "step": step, "completions": 32, "lag_max": 4}
            self.rows.append({**row, "prompt_ids": list(PROMPTS[step])})

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("event") == name]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Ended:
    monkeypatch.setattr(driver, "expected_prompts", lambda run, steps: PROMPTS)
    return Ended(tmp_path)


def test_nothing_is_wrong_with_a_run_that_trained_everything_once(run):
    again = {**run.rows[-1], "completions": 32}
    (run.output / "metrics.dropped-0.jsonl").write_text(json.dumps(again) + "\n")
    assert driver.problems(run) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda rows: rows.append(rows[3]), "steps"),
        (lambda rows: rows.pop(3), "steps"),
        (lambda rows: rows[3]["prompt_ids"].reverse(), "step 1: prompts"),
        (lambda rows: rows[3].update(completions=31), "step 1: 31 completions"),
        (lambda rows: rows[3].update(lag_max=5), "step 1: lag 5"),
        (lambda rows: rows.pop(0), "evaluations"),
        (lambda rows: rows.append({"kind": "event", "event": "prompt_failed"}), "1 times"),
    ],
)
def test_a_loss_and_a_repetition_are_seen(run, change, problem):
    change(run.rows)
    (first, *_) = driver.problems(run)
    assert first.startswith(problem)


def test_an_evaluation_that_a_start_lost_is_replaced_once(run):
    first, last = run.rows.pop(0), {"kind": "event", "event": "resumed", "step": 3}
    assert driver.problems(run) == ["evaluations [5]"]
    run.rows = [last, {**first, "step": 3}, *run.rows]
    assert driver.problems(run) == []
    run.rows.insert(2, {**first, "step": 4})
    run.rows.insert(0, {**last, "step": 4})
    assert driver.problems(run) == ["evaluations [3, 4, 5]"]


def test_a_repeated_step_has_the_prompts_of_the_first_time(run):
    again = {**run.rows[-1], "prompt_ids": [0, 0, 0, 0]}
    (run.output / "metrics.dropped-0.jsonl").write_text(json.dumps(again) + "\n")
    assert driver.problems(run) == ["step 4: prompts [0, 0, 0, 0]"]


def test_the_list_has_40_points_and_each_is_one():
    faults = [Fault(point) for points in RUNS for point in points]
    assert len({fault.point for fault in faults}) >= 40
    for fault in faults:
        assert fault.moment in MOMENTS or fault.action == "join"
        last = [points[-1] for points in RUNS if fault.point in points]
        assert fault.moment != "ending" or fault.point in last
