"""metrics.jsonl holds every row once, in one curve, also after a kill."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.metrics import METRICS, MetricsError, MetricsWriter, read_metrics
from megatron_rl.metrics.metrics_file import SCHEMA, SCHEMA_ROW, last_rows


def steps(rows: list[dict], kind: str = "step") -> list[int]:
    return [row["step"] for row in rows if row["kind"] == kind]


def written(path: Path, last_step: int, every: int = 2) -> Path:
    """Write a run of `last_step` updates, evaluated before every second one and at the end."""
    with closing(MetricsWriter(path)) as w:
        w.write("event", {"event": "started", "step": 0})
        for step in range(last_step):
            if step % every == 0:
                w.write("eval", {"step": step, "pass_rate": step / 100})
            w.write("step", {"step": step, "loss": -step})
        w.write("eval", {"step": last_step, "pass_rate": last_step / 100})
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_the_first_line_explains_the_file(path: Path) -> None:
    written(path, 3)
    head = json.loads(path.read_text().splitlines()[0])
    assert head == {"kind": "schema", "schema": SCHEMA, "fields": METRICS}


def test_every_metric_has_a_meaning_and_numbers_have_a_unit() -> None:
    text = {"kind", "nonfinite", "event", "message", "phase", "file", "tasks", "sets"}
    for name, meaning in METRICS.items():
        assert len(meaning) > 5, name
        assert name in text or meaning.rstrip().endswith("]"), f"{name}: which unit?"


def test_rows_are_on_the_disk_when_the_call_returns(path: Path) -> None:
    w = MetricsWriter(path)
    w.write("step", {"step": 0, "loss": 0.5})
    assert read_metrics(path)[0]["loss"] == 0.5
    w.close()
    w.close()


def test_rows_come_back_as_they_were_written(path: Path) -> None:
    row = {"step": 4, "loss": 0.1, "prompt_ids": [3, 1], "lag_histogram": {"0": 5, "3": 1}}
    with closing(MetricsWriter(path)) as w:
        w.write("step", row)
    (back,) = read_metrics(path)
    assert {k: back[k] for k in row} == row
    assert back["kind"] == "step"
    assert back["unix_seconds"] > 1e9


def test_numpy_values_are_plain_numbers_in_the_file(path: Path) -> None:
    with closing(MetricsWriter(path)) as w:
        w.write(
            "step",
            {"step": np.int64(2), "loss": np.float32(0.5), "ids": np.arange(2), "ok": np.True_},
        )
    (row,) = read_metrics(path)
    assert (row["step"], row["loss"], row["ids"], row["ok"]) == (2, 0.5, [0, 1], True)


@given(st.dictionaries(st.text(min_size=1), st.floats() | st.integers() | st.text(), max_size=5))
def test_any_row_can_be_read_back_and_nonfinite_values_are_named(
    tmp_path_factory: pytest.TempPathFactory, row: dict
) -> None:
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    row = {k: v for k, v in row.items() if k not in ("kind", "step", "nonfinite")}
    with closing(MetricsWriter(path)) as w:
        w.write("step", row | {"step": 0})
    (back,) = read_metrics(path)
    bad = {k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    assert set(back.get("nonfinite", [])) == bad
    for name, value in row.items():
        assert back[name] == (None if name in bad else value)


def test_nonfinite_values_inside_lists_and_mappings_are_named(path: Path) -> None:
    with closing(MetricsWriter(path)) as w:
        w.write("step", {"step": 0, "a": [1.0, float("nan")], "b": {"x": float("inf")}})
    (row,) = read_metrics(path)
    assert (row["a"], row["b"], row["nonfinite"]) == ([1.0, None], {"x": None}, ["a.1", "b.x"])


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("step", {"loss": 1.0}, "step = None"),
        ("step", {"step": 1.5}, "step = 1.5"),
        ("eval", {"step": True}, "step = True"),
        ("event", {"step": 1}, "event = None"),
        ("step", {"step": 1, "loss": object()}, "loss is a object"),
    ],
)
def test_a_row_that_is_no_row_is_refused(path: Path, kind: str, row: dict, message: str) -> None:
    with closing(MetricsWriter(path)) as w, pytest.raises(MetricsError, match=message):
        w.write(kind, row)
    assert read_metrics(path) == []


# ---------------------------------------------------------------- resume


def test_resume_keeps_steps_before_and_evaluations_up_to_the_checkpoint(path: Path) -> None:
    written(path, 6)
    with closing(MetricsWriter(path, resume_step=4)) as w:
        w.write("step", {"step": 4, "loss": 0.0})
    rows = read_metrics(path)
    assert steps(rows) == [0, 1, 2, 3, 4]
    assert steps(rows, "eval") == [0, 2, 4]
    assert [r["event"] for r in rows if r["kind"] == "event"] == ["started", "resumed"]


def test_resume_moves_what_it_drops_to_a_file_of_the_same_layout(path: Path) -> None:
    written(path, 6)
    before = read_metrics(path)
    MetricsWriter(path, resume_step=4).close()
    aside = path.with_name("metrics.dropped-0.jsonl")
    after, dropped = read_metrics(path), read_metrics(aside)
    assert steps(dropped) == [4, 5]
    assert steps(dropped, "eval") == [6]
    note = after[-1]
    expected = {"event": "resumed", "step": 4, "rows": 3, "file": aside.name}
    assert {name: note[name] for name in expected} == expected
    # Nothing is lost and nothing is there twice.
    key = json.dumps
    assert sorted(map(key, after[:-1] + dropped)) == sorted(map(key, before))


def test_resume_twice_writes_two_dropped_files(path: Path) -> None:
    written(path, 6)
    for step in (4, 2):
        MetricsWriter(path, resume_step=step).close()
    assert steps(read_metrics(path.with_name("metrics.dropped-0.jsonl"))) == [4, 5]
    assert steps(read_metrics(path.with_name("metrics.dropped-1.jsonl"))) == [2, 3]
    assert steps(read_metrics(path)) == [0, 1]


def test_resume_without_anything_to_drop_leaves_no_dropped_file(path: Path) -> None:
    written(path, 6)
    MetricsWriter(path, resume_step=6).close()
    assert list(path.parent.iterdir()) == [path]
    assert steps(read_metrics(path)) == list(range(6))


def test_a_resumed_run_without_a_file_begins_one(path: Path) -> None:
    MetricsWriter(path, resume_step=4).close()
    assert [r["event"] for r in read_metrics(path)] == ["resumed"]


def test_a_new_run_moves_the_old_file_aside_whole(path: Path) -> None:
    written(path, 6)
    before = read_metrics(path)
    MetricsWriter(path).close()
    assert read_metrics(path) == []
    assert read_metrics(path.with_name("metrics.dropped-0.jsonl")) == before


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_moved_aside_and_the_file_goes_on(path: Path, cut: int) -> None:
    written(path, 6)
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    if cut > 1:
        assert steps(read_metrics(path), "eval") == [0, 2, 4]
    with closing(MetricsWriter(path, resume_step=6)) as w:
        w.write("step", {"step": 6})
    rows = read_metrics(path)
    assert steps(rows) == [0, 1, 2, 3, 4, 5, 6]
    aside = path.with_name("metrics.dropped-0.jsonl")
    if cut == 1:
        # Only the line's end was lost: the row is whole.
        assert steps(rows, "eval") == [0, 2, 4, 6]
        assert not aside.exists()
    else:
        torn = data[:-cut].rsplit(b"\n", 1)[1]
        assert aside.read_bytes().splitlines()[-1] == torn


@given(cut=st.integers(0, 2000), step=st.integers(0, 6))
def test_a_file_cut_anywhere_can_be_gone_on_with(
    tmp_path_factory: pytest.TempPathFactory, cut: int, step: int
) -> None:
    path = written(tmp_path_factory.mktemp("m") / "metrics.jsonl", 6)
    data = path.read_bytes()
    path.write_bytes(data[: max(len(data) - cut, 0)])
    whole = [r for r in map(_json, path.read_bytes().splitlines()) if r and r["kind"] == "step"]
    with closing(MetricsWriter(path, resume_step=step)) as w:
        w.write("step", {"step": step})
    assert steps(read_metrics(path)) == [s["step"] for s in whole if s["step"] < step] + [step]


def _json(line: bytes) -> dict | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def test_a_run_killed_while_it_writes_leaves_a_file_to_go_on_with(path: Path) -> None:
    code = f"""
        from megatron_rl.metrics import MetricsWriter
        w = MetricsWriter({str(path)!r})
        step = 0
        while True:
            w.write("step", {{"step": step, "prompt_ids": list(range(3000))}})
            step += 1
            print(step, flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        while int(run.stdout.readline()) < 50:
            pass
        run.send_signal(signal.SIGKILL)
        run.wait(timeout=30)
    with closing(MetricsWriter(path, resume_step=40)) as w:
        w.write("step", {"step": 40})
    assert steps(read_metrics(path)) == list(range(41))


def test_another_schema_is_refused_and_left_alone(path: Path) -> None:
    text = '{"kind": "schema", "schema": "megatron_rl.metrics/99"}\n'
    path.write_text(text)
    for resume in (None, 3):
        with pytest.raises(MetricsError, match="metrics/99"):
            MetricsWriter(path, resume_step=resume)
    assert path.read_text() == text


# ---------------------------------------------------------------- reading


def test_a_bad_line_in_the_middle_is_named(path: Path) -> None:
    path.write_text(json.dumps(SCHEMA_ROW) + '\n{"kind": "st\n{"kind": "event", "event": "x"}\n')
    with pytest.raises(MetricsError, match="line 2 is not a JSON object"):
        read_metrics(path)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(MetricsError, match="no such file of metrics"):
        read_metrics(path)


def test_of_two_rows_for_one_step_the_last_counts() -> None:
    rows = [
        {"kind": "eval", "step": 4, "pass_rate": 0.1},
        {"kind": "eval", "step": 2, "pass_rate": 0.2},
        {"kind": "step", "step": 4},
        {"kind": "eval", "step": 4, "pass_rate": 0.3},
    ]
    assert [r["pass_rate"] for r in last_rows(rows, "eval")] == [0.2, 0.3]
