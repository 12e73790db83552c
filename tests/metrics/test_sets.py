"""Evaluation sets from metrics.jsonl: their curves in the report, the fitter and the mirrors."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import numpy as np

from megatron_rl.metrics import MetricsWriter
from megatron_rl.metrics.run_report import report_lines, write_report
from megatron_rl.metrics.sink import scalars
from megatron_rl.metrics.terminal import ProgressLog
from megatron_rl.scaling import read


def sigmoid(tokens: float, a: float, middle: float) -> float:
    return 0.1 if tokens == 0 else 0.1 + (a - 0.1) / (1 + (middle / tokens) ** 1.2)


def written(path: Path) -> Path:
    """Write 13 evaluations of the held-out prompts, and of a set at other steps, one twice."""
    noise = np.random.default_rng(1).normal(0, 0.003, (2, 13))
    with closing(MetricsWriter(path)) as w:
        for i, tokens in enumerate([0.0, *np.geomspace(4e3, 4e5, 12)]):
            rate = sigmoid(tokens, 0.8, 40_000) + noise[0, i]
            row = {"step": 2 * i, "compute_tokens": tokens, "pass_rate": rate}
            w.write("eval", {**row, "pass_rate_stderr": 0.003, "eval_entropy": 0.9 - i / 20})
            other = {"step": 2 * i + 1, "compute_tokens": tokens * 1.1}
            for wrong in (0.5, 0.0) if i == 4 else (0.0,):
                rate = sigmoid(tokens * 1.1, 0.6, 60_000) + noise[1, i] + wrong
                w.write(
                    "sets",
                    {**other, "sets": {"aime": {"pass_rate": rate, "pass_rate_stderr": 0.003}}},
                )
    return path


def test_a_set_has_a_curve_of_its_own_and_the_fit_of_the_run_is_without_it(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl")
    summary = write_report(tmp_path, path, phases={}, fit_compute="tokens", versions={})
    assert summary["fit"]["points"] == 13
    assert summary["fit"]["A"]["low"] <= 0.8 <= summary["fit"]["A"]["high"]
    fit = summary["sets"]["aime"]["fit"]
    assert fit["points"] == 13 and fit["A"]["low"] <= 0.6 <= fit["A"]["high"]
    assert summary["sets"]["aime"]["pass_rate"]["last"]["step"] == 25
    assert summary["tasks"] == {}
    assert (tmp_path / "fit_sets.png").read_bytes().startswith(b"\x89PNG")
    lines = dict(report_lines(summary))
    assert lines["held-out entropy [nats/token]"] == "0.900 at step 0 → 0.300 at step 24"
    assert lines["aime: fit"].startswith("A 0.")


def test_the_fitter_reads_sets_as_series_by_name(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    heldout, aime = read(written(tmp_path / "run" / "metrics.jsonl"))
    assert (heldout.name, aime.name) == ("run", "run:aime")
    for series in (heldout, aime):
        assert len(series) == 13 and series.stderr is not None
        assert not [note for note in series.repairs if "left out" in note]
    assert max(aime.reward) < 0.62 < max(heldout.reward)


def test_sets_are_shown_by_name() -> None:
    row = {"kind": "sets", "step": 4, "compute_tokens": 7, "sets": {"aime": {"pass_rate": 0.25}}}
    assert scalars(row) == {"compute_tokens": 7.0, "sets/aime/pass_rate": 0.25}
    stream = io.StringIO()
    ProgressLog(8, stream=stream).update(row)
    assert "pass rate at step 4: aime 0.250" in stream.getvalue()
