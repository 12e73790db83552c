"""`megatron-rl runs`: each state, damaged files, and that large files are not read whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from megatron_rl import liveness, run_lock
from megatron_rl.cli import app
from megatron_rl.commands.list_runs import overview
from megatron_rl.config import RunConfig, save_config
from megatron_rl.metrics import MetricsWriter, metrics_file, read_metrics, run_report
from megatron_rl.metrics.metrics_file import SCHEMA_ROW, latest_rows
from megatron_rl.section import ConfigError

LIMIT = 300.0
FILES = ("config.yaml", "metrics.jsonl", "summary.json", "alive.json", "final_error.json")


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this node's signs."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setenv(liveness.FOLDER, str(folder))
    return folder


def make_run(folder: Path, steps: int = 8, **config: object) -> Path:
    """Write what a run has after `steps` of 10 steps, evaluated at steps 0, 2, 4, ..."""
    save_config(
        RunConfig.model_validate({"output_dir": folder, "schedule": {"steps": 10}} | config)
    )
    writer = MetricsWriter(folder / "metrics.jsonl")
    for step in range(steps + 1):
        compute = {"compute_train_tokens": 1000 * step + 1}
        if step % 2 == 0:
            rate = 0.2 + 0.6 / (1 + (2000 / compute["compute_train_tokens"]) ** 1.5)
            writer.write("eval", {"step": step, **compute, "pass_rate": rate})
        if step < steps:
            writer.write("step", {"step": step, **compute, "loss": 0.1})
    writer.close()
    return folder


def sign(
    run: Path, state: str = "training", age: float = 1.0, gone: bool = False, **own: object
) -> Path:
    """Write rank 0's sign; the process is this one, or gone."""
    values = {"run": str(run), "role": "trainer", "rank": 0, "host": socket.gethostname(),
              "pid": os.getpid(), "born": -2 if gone else liveness.born(os.getpid()), "step": 7,
              "incarnation": 0, "state": state, "time": time.time() - age, "limit": LIMIT,
              **own}  # fmt: skip
    path = run / "alive.json"
    path.write_bytes(msgspec.json.encode(values))
    return path


def report(run: Path, *, interrupted: bool = False) -> None:
    """Write what `runs` reads of a summary."""
    values = {"fit": {"points": 2, "error": "few"}, "run": {"interrupted": interrupted}}
    (run / "summary.json").write_text(json.dumps({"schema": run_report.SCHEMA, **values}))


def listed(folder: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["runs", str(folder), *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def lines_of(folder: Path) -> dict[str, list[str]]:
    """Return the cells of each run in the table, in its order, without the empty ones."""
    lines = (re.split("  +", line.strip()) for line in listed(folder).splitlines()[3:])
    return {line[0]: line[1:] for line in lines if line[0]}


def test_a_run_that_trains_has_its_step_rate_and_last_sign(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "grpo" / "seed-1", recipe="grpo")
    sign(run, age=90.0)
    held = run_lock.hold(run)
    started = json.loads((run / "run.lock").read_text())["unix"]
    row = overview(run)
    held.close()
    assert (row.state, row.note, row.step, row.steps) == ("training", "", 8, 10)
    assert (row.pass_rate_step, row.started, row.problems) == (8, started, [])
    assert row.pass_rate == pytest.approx(0.2 + 0.6 / (1 + (2000 / 8001) ** 1.5))
    assert row.last_sign == pytest.approx(time.time(), abs=60)  # of a row: it is newer
    assert (row.model, row.recipe) == ("tiny_scout", "grpo")
    start = time.strftime("%F %R", time.gmtime(started))
    cells = lines_of(tmp_path / "runs")["grpo/seed-1"]
    assert cells[:3] == ["training", "8/10", "0.733 at 8"]
    assert re.fullmatch(r"\d+ s ago", cells[3])
    assert cells[4:] == [start, "tiny_scout, grpo"]


def test_every_state_has_its_name(tmp_path: Path, node: Path, monkeypatch) -> None:
    runs = tmp_path / "runs"
    names = ("evaluates", "ended", "stopped", "killed", "restarts", "hangs", "elsewhere", "engine",
             "rank 0", "failed", "copied", "bare")  # fmt: skip
    for name in names:
        make_run(runs / name, steps=2)
    sign(runs / "evaluates", "evaluating")
    report(runs / "ended")
    sign(runs / "ended", "ended", age=9e4, gone=True)
    report(runs / "stopped", interrupted=True)
    sign(runs / "stopped", "ended", gone=True)
    sign(runs / "killed", "saving", age=90.0, gone=True)
    sign(runs / "restarts", age=30.0, gone=True)  # torchrun may start it again
    sign(runs / "hangs", age=LIMIT + 10)
    sign(runs / "elsewhere", age=LIMIT + 10, gone=True, host="node-7")
    for name, age in (("engine", LIMIT + 10), ("rank 0", 1.0)):  # of a generator of this node
        generator = sign(runs / name, "generating", age=age, role="generator", rank=3)
        generator.replace(node / f"{liveness.run_prefix(runs / name)}1.json")
    sign(runs / "engine")
    sign(runs / "rank 0", age=LIMIT + 10, gone=True, host="node-7")
    sign(runs / "failed", age=90.0, gone=True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    run_lock.record_final_error(runs / "failed", "RunError: no reward\x1b[2J")
    report(runs / "copied")
    rows = {name: overview(runs / name) for name in names}
    assert {name: row.state for name, row in rows.items()} == {
        "evaluates": "evaluating", "ended": "ended", "stopped": "interrupted", "killed": "killed",
        "restarts": "training", "hangs": "overdue", "elsewhere": "overdue", "engine": "overdue",
        "rank 0": "overdue", "failed": "failed", "copied": "ended", "bare": "unknown",
    }  # fmt: skip
    assert not any(row.problems for row in rows.values())
    assert f"process {os.getpid()} is gone (saving)" in rows["killed"].note
    assert "(hangs), its log and `py-spy dump" in rows["hangs"].note
    assert "(on node-7)" in rows["elsewhere"].note
    assert "generator rank 3: generating" in rows["engine"].note
    text = listed(runs)
    assert "failed: RunError: no reward⟨U+001B⟩[2J" in text
    assert "\x1b" not in text
    assert "--resume" in text
    assert [name for name in rows if rows[name].note] == [
        "killed", "hangs", "elsewhere", "engine", "rank 0", "failed",
    ]  # fmt: skip


def test_the_fit_is_that_of_the_last_start(tmp_path: Path) -> None:
    few, fitted = make_run(tmp_path / "few", steps=4), make_run(tmp_path / "fitted", steps=10)
    parts = {"phases": {}, "fit_compute": "train_tokens", "versions": {}}
    summary = run_report.write_report(few, few / "metrics.jsonl", **parts)
    summary["fit"] = {"points": 6, "A": {"value": 0.8, "low": 0.7512, "high": None}}
    (fitted / "summary.json").write_text(json.dumps(summary))
    lines = lines_of(tmp_path)
    assert "too few evaluations" in lines["few"]
    assert "0.800 [0.751, ?]" in lines["fitted"]
    run_lock.hold(fitted).close()  # an extended run, which trains again
    os.utime(fitted / "summary.json", (time.time() - 60,) * 2)
    sign(fitted)
    row = overview(fitted)
    assert (row.state, row.fit) == ("training", None)


def test_runs_are_in_the_order_of_their_last_signs_and_checkpoints_are_left_out(
    tmp_path: Path,
) -> None:
    for age, name in ((50.0, "b/middle"), (10.0, "c/deep/newest"), (9000.0, "a/oldest")):
        (run := tmp_path / name).mkdir(parents=True)
        sign(run, age=age, limit=1e5)
    for inside in ("checkpoints/step_000001", "wandb/offline-run-1/files", ".hidden"):
        (folder := tmp_path / "b/middle" / inside).mkdir(parents=True)
        (folder / "config.yaml").touch()
    assert list(lines_of(tmp_path)) == ["c/deep/newest", "b/middle", "a/oldest"]
    shown = json.loads(listed(tmp_path, "--json"))
    assert shown["schema"] == "megatron_rl.runs/1"
    assert [run["step"] for run in shown["runs"]] == [7, 7, 7]
    assert [Path(run["folder"]).name for run in shown["runs"]] == ["newest", "middle", "oldest"]
    assert list(lines_of(tmp_path / "b/middle")) == ["."]


def test_a_folder_without_runs_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for folder, problem in ((tmp_path, "no run is there"), (tmp_path / "x", "no such folder")):
        with pytest.raises(ConfigError, match=f"{folder}: {problem}: give a folder above"):
            app(["runs", str(folder)], standalone_mode=False)


CONTENTS = {
    "empty": b"",
    "half": b'{"kind": "schema", "sch',
    "bytes": b"\xff\xfe\x00[]\n",
    "number": b"3\n",
    "list": b"[1]\n",
    "other": b'{"schema": "other/9", "a": {}}\n',
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str) -> None:
    runs = tmp_path / "runs"
    whole = make_run(runs / "whole", steps=4)
    report(whole)
    sign(whole, "ended")
    for kind, content in CONTENTS.items():
        shutil.copytree(whole, runs / kind)
        (runs / kind / name).write_bytes(content)
    shutil.copytree(whole, runs / "folder")
    (runs / "folder" / name).unlink(missing_ok=True)
    (runs / "folder" / name).mkdir()
    rows = {path.name: overview(path) for path in runs.iterdir()}
    assert not rows.pop("whole").problems
    for kind, row in rows.items():
        (problem,) = row.problems or [row.note]
        assert f"{runs}/{kind}/{name}" in problem, kind
        known = [row.step, row.steps, row.pass_rate, row.fit, row.last_sign, row.state]
        assert sum(x not in (None, "unknown") for x in known) >= 4, kind
    text = listed(runs)
    failed = name == "final_error.json"  # an error that cannot be read is an error
    assert text.count(", damaged") == (1 if failed else len(rows))
    assert (text.count("   failed") == len(rows)) is failed
    assert len(json.loads(listed(runs, "--json"))["runs"]) == len(rows) + 1


def test_a_torn_last_line_is_named_and_the_rows_before_it_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 4, "lo')
    row = overview(run)
    assert (row.step, row.pass_rate_step) == (4, 4)
    assert row.problems == [f"{run / 'metrics.jsonl'}: its last line is torn"]


def test_values_of_another_type_are_damage_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    report(run)
    (run / "run.lock").write_text('{"unix": "yesterday"}')  # it tells nothing
    (run / "config.yaml").write_text("schedule: {steps: [3]}\nmodel: x\nrecipe: null\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step": 2, "pass_rate": "high"}\n')
    summary = json.loads((run / "summary.json").read_text())
    summary["fit"] = {"A": 3}
    (run / "summary.json").write_text(json.dumps(summary))
    assert len(overview(run).problems) == 3
    assert "unknown, damaged" not in listed(tmp_path)


@pytest.mark.parametrize("block", [7, 64, 1000, 1 << 18])
def test_the_last_rows_are_those_of_the_whole_file(tmp_path: Path, monkeypatch, block) -> None:
    monkeypatch.setattr(metrics_file, "_BLOCK", block)
    monkeypatch.setattr(metrics_file, "SCHEMA_ROW", SCHEMA_ROW | {"fields": {}})
    first = len(json.dumps(metrics_file.SCHEMA_ROW))
    path = make_run(tmp_path / "run") / "metrics.jsonl"
    if block <= first:
        monkeypatch.setattr(metrics_file, "_check_schema", lambda path, first: None)
    rows = read_metrics(path)
    expected = {kind: [r for r in rows if r["kind"] == kind][-1] for kind in ("step", "eval")}
    kinds = ("step", "eval", "sets")
    latest, last = latest_rows(path, kinds)
    assert (latest, last) == (expected, rows[-1] if block > 100 else last)
    with path.open("a") as file:
        file.write('{"kind": "eval", "step": 9, "pass_')  # a kill
    assert latest_rows(path, kinds) == (expected, None)
    with path.open("a") as file:
        file.write("\n")
    assert latest_rows(path, kinds)[0] == expected


def test_of_a_large_file_the_end_is_read(tmp_path: Path, monkeypatch) -> None:
    path = make_run(tmp_path / "run", steps=3) / "metrics.jsonl"
    rest, size = path.read_bytes(), 1 << 30
    with path.open("r+b") as file:  # sparse: it takes no disk
        file.seek(size)
        file.write(b"\n" + rest[rest.index(b"\n") + 1 :])
    read, opened = [], Path.open

    def counted(self, *arguments):
        file = opened(self, *arguments)

        class Counted:
            __enter__ = lambda self: self  # noqa: E731
            __exit__ = lambda *_: file.close()  # noqa: E731
            seek = file.seek

            def read(self, *size):
                read.append(len(data := file.read(*size)))
                return data

            def readline(self, *size):
                read.append(len(data := file.readline(*size)))
                return data

        return Counted()

    monkeypatch.setattr(Path, "open", counted)
    rows, last = latest_rows(path, ("step", "eval"))
    assert (rows["step"]["step"], rows["eval"]["step"], last) == (2, 2, rows["step"])
    assert sum(read) < 2e6
