"""wandb and TensorBoard show what metrics.jsonl holds, each at its own step."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import RunConfig
from megatron_rl.metrics import MetricsWriter, read_metrics
from megatron_rl.metrics.sink import (
    SAMPLE,
    SAMPLE_CHARACTERS,
    TABLE_ROWS,
    MirrorError,
    RunSink,
    TensorBoardMirror,
    WandbMirror,
    histograms,
    scalars,
)
from megatron_rl.metrics.terminal import UNSEEN

ROW: dict[str, Any] = {
    "kind": "step",
    "step": 0,
    "loss": -0.25,
    "tokens": 100,
    "grad_norm": None,
    "nonfinite": ["grad_norm"],
    "prompt_ids": [1, 2],
    "lag_histogram": {"0": 5, "2": 3},
}


def sample(step: int = 100, **values: Any) -> dict[str, Any]:
    texts = {"prompt": "2+3=?", "completion": "4", "verdict_reason": "4 is not 5"}
    return {"step": step, "task": "sums", "verdict": "wrong", "reward": None, **texts, **values}


def test_scalars_leave_out_text_null_lists_and_bookkeeping() -> None:
    assert scalars(ROW) == {"loss": -0.25, "tokens": 100.0}


def test_histogram_fills_gaps_and_refuses_what_is_none() -> None:
    row = {"x": {"0": 5, "2": 3}, "text": {"right": 3}, "parts": {"1": {}}, "no": {}, "list": [1]}
    assert [*histograms(row)] == [("x", [(0, 5), (1, 0), (2, 3)])]


# ---------------------------------------------------------------- TensorBoard


def tensorboard_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0})
    events.Reload()
    return events


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    mirror = TensorBoardMirror(tmp_path)
    for step in range(3):
        mirror.log(ROW | {"step": step, "loss": -step})
    mirror.log({"kind": "eval", "step": 2, "pass_rate": 0.5})
    mirror.log({"kind": "event", "event": "saved", "seconds": 3.0})
    mirror.close()
    events = tensorboard_events(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 0), (1, -1), (2, -2)]
    assert [(e.step, e.value) for e in events.Scalars("eval/pass_rate")] == [(2, 0.5)]
    assert sorted(events.Tags()["scalars"]) == ["eval/pass_rate", "train/loss", "train/tokens"]
    (first, *_) = events.Histograms("train/lag_histogram")
    assert first.histogram_value.bucket == [5, 0, 3]
    assert first.histogram_value.sum == 6


def test_a_resumed_run_shows_one_curve_in_tensorboard(tmp_path: Path) -> None:
    mirror = TensorBoardMirror(tmp_path)
    for step in range(6):
        mirror.log({"kind": "step", "step": step, "loss": 1.0})
    mirror.close()
    mirror = TensorBoardMirror(tmp_path, first_step=4)
    mirror.log({"kind": "step", "step": 4, "loss": 2.0})
    mirror.close()
    events = tensorboard_events(tmp_path / "tensorboard").Scalars("train/loss")
    assert [(e.step, e.value) for e in events] == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)]


def test_a_new_run_in_an_old_folder_hides_the_old_curve(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        mirror = TensorBoardMirror(tmp_path)
        mirror.log({"kind": "step", "step": 0, "loss": loss})
        mirror.close()
    events = tensorboard_events(tmp_path / "tensorboard").Scalars("train/loss")
    assert [(e.step, e.value) for e in events] == [(0, 2)]


def test_tensorboard_shows_samples_as_text_and_never_as_markup(tmp_path: Path) -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    mirror = TensorBoardMirror(tmp_path)
    hostile = "**4**\n\n```\n[x](https://example.com)\n<img src=x>"
    mirror.samples([sample(verdict="correct", reward=1.0), sample(completion=hostile)])
    mirror.samples([sample(200)])
    mirror.close()
    events = tensorboard_events(tmp_path / "tensorboard")
    assert [e.step for e in events.Tensors("samples/wrong")] == [100, 200]
    (right,), (wrong, _) = (events.Tensors(f"samples/{kind}") for kind in ("right", "wrong"))
    assert right.tensor_proto.string_val[0].decode().splitlines() == [
        "    step: 100", "    task: sums", "    prompt: 2+3=?", "    completion: 4",
        "    verdict: correct", "    verdict_reason: 4 is not 5", "    reward: 1.0",
    ]  # fmt: skip
    metadata = events.SummaryMetadata("samples/right")
    assert metadata.plugin_data.plugin_name == "text"
    page = markdown_to_safe_html(wrong.tensor_proto.string_val[0])
    assert page.startswith("<pre><code>step: 100\ntask: sums")
    assert page.count("<") == 4
    assert "completion: **4**" in page


# ---------------------------------------------------------------- wandb


BLOCK_BYTES, FULL, LAST = 32768, 1, 4


def wandb_records(folder: Path) -> list[Any]:
    """Return the records of an offline run: protos in a LevelDB log (crc32, size, type, bytes)."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert data[:4] == b":W&B"
    at, part, records = 7, b"", []
    while at + 7 <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < 7:  # the rest of a block is padding
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            records.append(record)
            part = b""
    return records


def test_wandb_offline_holds_every_row_with_its_own_step(tmp_path: Path) -> None:
    mirror = WandbMirror(tmp_path, mode="offline", config={"seed": 3})
    for step in range(3):
        mirror.log(ROW | {"step": step})
    # An evaluation that comes late keeps its row: wandb's own step is not used.
    mirror.log({"kind": "eval", "step": 1, "pass_rate": 0.5})
    mirror.close()
    assert (tmp_path / "wandb_run_id.txt").read_text()
    records = wandb_records(tmp_path)
    rows = [
        {i.key or ".".join(i.nested_key): i.value_json for i in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    assert [r["train/step"] for r in rows if "train/step" in r] == ["0", "1", "2"]
    (evaluation,) = [r for r in rows if "eval/step" in r]
    assert (evaluation["eval/step"], evaluation["eval/pass_rate"]) == ("1", "0.5")
    assert "train/prompt_ids" not in rows[0]
    assert rows[0]["train/lag_histogram._type"] == '"histogram"'
    assert rows[0]["train/lag_histogram.values"] == "[5,0,3]"
    metrics = {
        r.metric.name or r.metric.glob_name: r.metric.step_metric
        for r in records
        if r.HasField("metric")
    }
    assert metrics["train/*"] == "train/step"
    assert metrics["eval/*"] == "eval/step"


def test_a_resumed_run_keeps_its_wandb_id_and_a_new_one_takes_another(tmp_path: Path) -> None:
    ids = []
    for first_step in (0, 4, 0):
        WandbMirror(tmp_path, mode="offline", first_step=first_step).close()
        ids.append((tmp_path / "wandb_run_id.txt").read_text())
    assert ids[0] == ids[1] != ids[2]


def test_wandb_shows_a_bounded_table_of_samples(tmp_path: Path) -> None:
    mirror = WandbMirror(tmp_path, mode="offline")
    for step in range(TABLE_ROWS):
        rewards = {"verdict": "correct", "reward": 1.0} if step else {}
        mirror.samples([sample(step, **rewards), sample(step)])
    mirror.close()
    rows = [
        {i.key or ".".join(i.nested_key): i.value_json for i in r.history.item}
        for r in wandb_records(tmp_path)
        if r.HasField("history")
    ]
    assert [json.loads(row["train/step"]) for row in rows] == [*range(TABLE_ROWS)]
    assert rows[-1]["train/samples._type"] == '"table-file"'
    tables = []
    for row in rows:
        (path,) = tmp_path.glob(
            f"wandb/offline-run-*/files/{json.loads(row['train/samples.path'])}"
        )
        tables.append(json.loads(path.read_text()))
    assert tables[0]["columns"] == list(SAMPLE)
    assert [dict(zip(SAMPLE, row, strict=True)) for row in tables[0]["data"]] == [sample(0)] * 2
    assert [len(table["data"]) for table in tables[-2:]] == [TABLE_ROWS] * 2
    assert {row[0] for row in tables[-1]["data"]} == {*range(TABLE_ROWS // 2, TABLE_ROWS)}


@pytest.mark.parametrize(
    ("blocked", "start"),
    [
        ("wandb", "WandbMirror({folder!r}, mode='offline')"),
        ("tensorboard", "TensorBoardMirror({folder!r})"),
    ],
)
def test_a_mirror_that_is_not_installed_names_the_extra(
    tmp_path: Path, blocked: str, start: str
) -> None:
    code = (
        f"import sys; sys.modules[{blocked!r}] = None\n"
        "from megatron_rl.metrics.sink import TensorBoardMirror, WandbMirror\n"
        + start.format(folder=str(tmp_path))
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert MirrorError.__name__ in done.stderr
    assert "pip install 'megatron_rl[io]'" in done.stderr
    assert f"metrics.{blocked}" in done.stderr


# ---------------------------------------------------------------- all of them


def test_the_sink_writes_every_output(tmp_path: Path, capsys: Any) -> None:
    config = RunConfig.model_validate(
        {"output_dir": str(tmp_path), "metrics": {"tensorboard": True, "wandb": "offline"}}
    )
    path = tmp_path / "metrics.jsonl"
    sink = RunSink(config, MetricsWriter(path))
    sink.write("eval", {"step": 0, "pass_rate": 0.25})
    sink.write("step", {"step": 0, "loss": 1.0})
    sink.note("evaluating")
    sink.close()
    assert [row["kind"] for row in read_metrics(path)] == ["eval", "step"]
    tags = tensorboard_events(tmp_path / "tensorboard").Tags()["scalars"]
    assert sorted(tags) == ["eval/pass_rate", "train/loss"]
    assert len([r for r in wandb_records(tmp_path) if r.HasField("history")]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "step 0/1000, pass rate 0.250",
        "evaluating",
    ]


def test_the_terminal_can_be_off(tmp_path: Path, capsys: Any) -> None:
    config = RunConfig.model_validate({"output_dir": str(tmp_path), "metrics": {"terminal": "off"}})
    sink = RunSink(config, MetricsWriter(tmp_path / "metrics.jsonl"))
    sink.note("evaluating")
    sink.write("eval", {"step": 0, "pass_rate": 0.25})
    sink.close()
    assert capsys.readouterr().out == ""


class Recorded:
    """A mirror that keeps what it gets, and fails at its `fails`-th call."""

    def __init__(self, fails: int = 0) -> None:
        self.calls, self.fails = list[Any](), fails

    def log(self, row: Any) -> None:
        self.calls.append(row)
        if len(self.calls) == self.fails:
            raise RuntimeError("no space left for the mirror")

    samples = log

    def close(self) -> None:
        self.log("closed")


def test_samples_are_shown_everywhere_short_and_visible(tmp_path: Path, capsys: Any) -> None:
    config = RunConfig.model_validate({"output_dir": str(tmp_path)})
    sink, mirror = RunSink(config, MetricsWriter(tmp_path / "metrics.jsonl")), Recorded()
    sink.mirrors.append(mirror)
    sink.samples([sample(prompt="\x1b[2J" * 10_000, completion="a\nb", prompt_token_ids=b"")])
    ((row,),) = mirror.calls
    assert (row["completion"], row["reward"]) == ("a\nb", None)
    assert SAMPLE_CHARACTERS < len(row["prompt"]) < 9 * SAMPLE_CHARACTERS
    assert not UNSEEN.search(row["prompt"])
    assert "  completion: a⏎b\n" in capsys.readouterr().out
    sink.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_mirror_that_fails_costs_the_run_nothing(tmp_path: Path, capsys: Any, fails: int) -> None:
    config = RunConfig.model_validate({"output_dir": str(tmp_path), "metrics": {"terminal": "off"}})
    path = tmp_path / "metrics.jsonl"
    sink, broken, whole = RunSink(config, MetricsWriter(path)), Recorded(fails), Recorded()
    sink.mirrors += [broken, whole]
    sink.write("step", {"step": 0, "loss": 1.0})
    sink.samples([sample()])
    sink.close()
    assert len(read_metrics(path)) == 1
    assert (len(broken.calls), len(whole.calls)) == (fails, 3)
    assert capsys.readouterr().err == (
        "warning: Recorded failed (RuntimeError: no space left for the mirror): it gets nothing"
        " more; metrics.jsonl and the rollout files have all of it\n"
    )
