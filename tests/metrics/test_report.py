"""The report says what the run measured, and ends well when there is no fit."""

from __future__ import annotations

import io
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron_rl.metrics import MetricsError, MetricsWriter
from megatron_rl.metrics.alarms import Alarms
from megatron_rl.metrics.run_report import report_lines, write_report
from megatron_rl.metrics.terminal import print_table

A, B, CMID, R0 = 0.8, 1.4, 40_000.0, 0.25
PHASES = {"set-up": 20.0, "sft": 90.5, "rl": 240.0}
VERSIONS = {"python": "3.12", "megatron-core": "0.18.2"}


def pass_rate(tokens: float) -> float:
    return R0 if tokens == 0 else R0 + (A - R0) / (1 + (CMID / tokens) ** B)


def run(folder: Path, evaluations: int = 13, **changes: Any) -> Path:
    """metrics.jsonl of a run of 200 steps of 1,000 tokens on a known sigmoid."""
    path = folder / "metrics.jsonl"
    at = {0, *np.geomspace(4, 200, evaluations - 1).round().astype(int).tolist()}
    at = set(sorted(at)[:evaluations])
    noise = np.random.default_rng(0).normal(0, 0.004, 201)
    with closing(MetricsWriter(path)) as w:
        for step in range(201):
            tokens = 1000 * step
            compute = {"compute_tokens": tokens, "compute_device_hours": tokens / 1e6}
            if step in at:
                rate = pass_rate(tokens) + float(noise[step])
                row = {"step": step, "pass_rate": rate, "pass_rate_stderr": 0.004}
                w.write("eval", row | compute)
            if step < 200:
                w.write(
                    "step",
                    {
                        "step": step,
                        **compute,
                        "tokens": 1000,
                        "completions": 100,
                        "completions_long": 10 if step < 100 else 30,
                        "multi_version_fraction": 0.5,
                        "multi_version_fraction_long": 0.2 if step < 100 else 0.6,
                        "lag_max": min(step, 6),
                        "aborted_requests": 0,
                        **changes,
                    },
                )
            if step % 50 == 0 and step < 200:
                w.write("event", {"event": "probe", "logprob_error_max": 1e-6 * (step + 1)})
    return path


def report(folder: Path, path: Path, **options: Any) -> dict[str, Any]:
    options = {"phases": PHASES, "fit_compute": "tokens", "versions": VERSIONS} | options
    return write_report(folder / "out", path, **options)


def test_the_fit_of_a_known_sigmoid_is_in_the_summary_with_its_picture(tmp_path: Path) -> None:
    summary = report(tmp_path, run(tmp_path))
    fit = summary["fit"]
    assert fit["points"] == 13
    for name, true in (("A", A), ("B", B), ("Cmid", CMID)):
        assert fit[name]["low"] <= true <= fit[name]["high"], name
        assert fit[name]["low"] <= fit[name]["value"] <= fit[name]["high"], name
    assert fit["R0"]["value"] == pytest.approx(R0, abs=0.02)
    assert (tmp_path / "out" / fit["picture"]).read_bytes().startswith(b"\x89PNG")


def test_the_summary_file_holds_what_is_returned(tmp_path: Path) -> None:
    summary = report(tmp_path, run(tmp_path), extra={"model": "tiny_scout"})
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    assert summary["schema"] == "megatron_rl.summary/1"
    assert summary["run"] == {"model": "tiny_scout"}
    assert summary["versions"] == VERSIONS


def test_shares_over_the_run_count_completions_and_not_steps(tmp_path: Path) -> None:
    summary = report(tmp_path, run(tmp_path))
    # 100 steps x 10 completions at .2, 100 steps x 30 at .6: (200 + 1800) / 4000 = .5
    assert summary["multi_version_fraction_long"] == pytest.approx(0.5)
    assert summary["multi_version_fraction"] == pytest.approx(0.5)


def test_totals_and_extremes(tmp_path: Path) -> None:
    summary = report(tmp_path, run(tmp_path))
    assert (summary["steps"], summary["tokens"], summary["completions"]) == (200, 200_000, 20_000)
    assert (summary["lag_max"], summary["aborted_requests"]) == (6, 0)
    assert summary["logprob_error"]["max"] == pytest.approx(1.51e-4)
    assert summary["compute"]["tokens"] == 200_000
    assert summary["pass_rate"]["first"]["step"] == 0
    assert summary["pass_rate"]["last"]["step"] == 200
    assert summary["wall_seconds"] == {**PHASES, "total": 350.5}


@pytest.mark.parametrize("evaluations", [1, 2])
def test_too_few_evaluations_are_said_and_the_report_ends_well(
    tmp_path: Path, evaluations: int
) -> None:
    summary = report(tmp_path, run(tmp_path, evaluations))
    assert summary["fit"]["points"] == evaluations
    assert "points" in summary["fit"]["error"] or "evaluations" in summary["fit"]["error"]
    assert not (tmp_path / "out" / "fit.png").exists()
    assert "none" in dict(report_lines(summary))["fit"]


def test_a_run_without_any_row_has_a_report(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).close()
    summary = report(tmp_path, path)
    assert summary["steps"] == 0
    assert summary["pass_rate"] == {"first": None, "last": None}
    assert summary["lag_max"] is None
    assert summary["fit"]["error"]
    print_table("run", report_lines(summary), Console(file=io.StringIO()))


def test_a_compute_that_was_not_measured_is_said(tmp_path: Path) -> None:
    fit = report(tmp_path, run(tmp_path), fit_compute="flops")["fit"]
    assert (fit["compute"], fit["points"]) == ("flops", 0)
    assert fit["error"]


def test_steps_can_be_the_axis(tmp_path: Path) -> None:
    fit = report(tmp_path, run(tmp_path), fit_compute="steps")["fit"]
    assert fit["Cmid"]["low"] <= CMID / 1000 <= fit["Cmid"]["high"]


def test_missing_metrics_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="no such file"):
        report(tmp_path, tmp_path / "none.jsonl")


def test_the_table_shows_the_curve_the_lag_and_the_seconds(tmp_path: Path) -> None:
    out = io.StringIO()
    lines = report_lines(report(tmp_path, run(tmp_path)))
    print_table("megatron_rl run", lines, Console(file=out, width=120))
    text = out.getvalue()
    for part in ("A (pass rate", "Cmid [tokens]", "50.0% of completions", "set-up 20", "total 350"):
        assert part in text


def test_alarms_and_truncations_are_in_the_summary_and_the_table(tmp_path: Path) -> None:
    watch, path = Alarms(), tmp_path / "metrics.jsonl"
    verdicts = {"correct": 64, "wrong": 64}
    with closing(MetricsWriter(path)) as w:
        for step in range(8):
            truncated = 16 if step in (2, 3, 6) else 12  # of 128: 12.5% and 9.4%
            row = {"step": step, "completions": 128, "completions_truncated": truncated}
            row |= {"verdicts": verdicts, "prompts_differing": 0 if step == 7 else 5}
            alarms = watch.check(row)
            w.write("step", row | ({"alarms": alarms} if alarms else {}))
    summary = report(tmp_path, path)
    assert summary["completions_truncated"] == 3 * 16 + 5 * 12
    spans = {n: (a["first_step"], a["last_step"], a["steps"]) for n, a in summary["alarms"].items()}
    assert spans == {"truncated": (2, 6, 3), "no_difference": (7, 7, 1)}
    lines = dict(report_lines(summary))
    assert lines["truncated completions"] == "108"
    shown = "3 steps, 2 to 6: 12% of 128 completions were truncated"
    assert lines["alarm: truncated"].startswith(shown)
    assert "answer_budget_tokens" in lines["alarm: truncated"]


# ---------------------------------------------------------------- several tasks


def mixture(folder: Path) -> Path:
    """Write evaluations of two tasks: the known sigmoid, and one that ends higher and later."""
    path = folder / "metrics.jsonl"
    noise = np.random.default_rng(1).normal(0, 0.003, (2, 13))
    with closing(MetricsWriter(path)) as w:
        for i, tokens in enumerate([0.0, *np.geomspace(4e3, 4e5, 12)]):
            late = 0.1 if tokens == 0 else 0.1 + 0.85 / (1 + (80_000 / tokens) ** 1.2)
            rates = {"sums": pass_rate(tokens) + noise[0, i], "lists": late + noise[1, i]}
            w.write(
                "eval",
                {
                    "step": i,
                    "compute_tokens": tokens,
                    "pass_rate": sum(rates.values()) / 2,
                    "pass_rate_stderr": 0.003,
                    "tasks": {
                        task: {"pass_rate": rate, "pass_rate_stderr": 0.003}
                        for task, rate in rates.items()
                    },
                },
            )
    return path


def test_each_task_has_its_own_curve_and_fit(tmp_path: Path) -> None:
    summary = report(tmp_path, mixture(tmp_path))
    assert list(summary["tasks"]) == ["sums", "lists"]
    for task, (a, cmid) in {"sums": (A, CMID), "lists": (0.95, 80_000)}.items():
        fit = summary["tasks"][task]["fit"]
        assert fit["points"] == 13
        assert fit["A"]["low"] <= a <= fit["A"]["high"], task
        assert fit["Cmid"]["low"] <= cmid <= fit["Cmid"]["high"], task
        assert summary["tasks"][task]["pass_rate"]["last"]["step"] == 12
    assert summary["fit"]["points"] == 13
    assert (tmp_path / "out" / "fit_tasks.png").read_bytes().startswith(b"\x89PNG")
    text = dict(report_lines(summary))
    assert re.match(r"A 0\.\d+  \[.*, B .*, Cmid ", text["sums: fit"])
    assert "→" in text["lists: pass rate"]


def test_a_run_of_one_task_has_no_curves_of_tasks(tmp_path: Path) -> None:
    summary = report(tmp_path, run(tmp_path))
    assert summary["tasks"] == {}
    assert not (tmp_path / "out" / "fit_tasks.png").exists()


def test_the_fitter_reads_the_tasks_of_the_file_as_series(tmp_path: Path) -> None:
    from megatron_rl.scaling import read

    folder = tmp_path / "demo"
    folder.mkdir()
    series = {s.name: s for s in read(mixture(folder))}
    assert list(series) == ["demo", "demo:sums", "demo:lists"]
    assert all(s.stderr is not None and len(s) == 13 for s in series.values())


def test_a_task_with_too_few_points_says_so(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as w:
        for step in range(2):
            tasks = {t: {"pass_rate": 0.5} for t in ("a", "b")}
            w.write(
                "eval", {"step": step, "compute_tokens": step, "pass_rate": 0.5, "tasks": tasks}
            )
    summary = report(tmp_path, path)
    assert "error" in summary["tasks"]["a"]["fit"]
    assert dict(report_lines(summary))["a: fit"].startswith("none, 2 evaluations")
