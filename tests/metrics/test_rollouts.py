"""Rollout files: schema, text, atomic replacement, disk, and what another start finds."""

import errno
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megatron_rl.files import DiskFull
from megatron_rl.metrics import MetricsError, read_rollouts
from megatron_rl.metrics.rollouts import (
    BYTES_PER_TOKEN,
    COLUMNS,
    MAX_PENDING,
    RolloutWriter,
    arrow_schema,
    record_batch,
)
from tests.source import ROOT


def decoded(ids):
    return " ".join(map(str, ids))


def row(index=0, tokens=4, **values):
    rng = np.random.default_rng(index)
    ids = rng.integers(0, 152_064, tokens).astype("<i4")
    logprobs = -rng.exponential(0.3, tokens).astype("<f4")
    return {
        "kind": "train", "step": 1, "set": "", "task": "sums", "prompt_id": 7, "group": 3,
        "index": index, "engine": "generator-0", "prompt": "2+3=?",
        "prompt_token_ids": np.arange(3, dtype="<i4").tobytes(), "token_ids": ids.tobytes(),
        "logprobs": logprobs.tobytes(), "versions": [(0, 1), (1, tokens - 1)],
        "ratios": np.exp(logprobs).tobytes(), "entropies": (-logprobs).tobytes(),
        "origins": [(0, tokens)], "finish_reason": "stop", "verdict": "correct",
        "verdict_reason": "", "reward": 1.0, "advantage": 0.5, "loss_weight": 0.25,
        "trained": True, "dropped_because": "", "lag_max": 1, "seconds_to_arrive": 1.5,
        "seconds_to_verify": 0.5, "unix_seconds": 1.7e9, **values,
    }  # fmt: skip


def writer(folder, max_bytes=1e9, **options):
    return RolloutWriter(folder, max_bytes=max_bytes, decode=decoded, **options)


def write(folder, *files, **options):
    one = writer(folder, **options)
    for kind, step, rows in files:
        one.write(kind, step, rows)
    one.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_has_the_rows_with_their_types_and_the_meaning_of_each_column(tmp_path):
    rows = [row(0), row(1, tokens=600), row(2, tokens=1, versions=[(4, 1)])]
    rows += [row(i, tokens=3) for i in range(3, 300)]  # more than a row group
    rows[2] |= {"trained": False, "ratios": None, "entropies": None}
    write(tmp_path, ("step", 1, rows))
    table = read_rollouts(tmp_path / "step_000001.parquet")
    assert table.schema == arrow_schema() and list(COLUMNS) == table.column_names
    assert table.schema.metadata == {b"schema": b"megatron_rl.rollouts/3"}
    for name, (_, doc) in COLUMNS.items():
        assert table.schema.field(name).metadata == {b"doc": doc.encode()}
    assert table.schema.field("logprobs").type == pyarrow.list_(pyarrow.float32())
    assert table.num_rows == 300 and parquet.ParquetFile(
        tmp_path / "step_000001.parquet"
    ).num_row_groups == 2  # fmt: skip
    for want, got in zip(rows, table.to_pylist(), strict=True):
        ids = np.frombuffer(want["token_ids"], "<i4").tolist()
        versions = [v for v, n in want["versions"] for _ in range(n)]
        arrays = {"token_ids": ids, "versions": versions, "origins": [0] * len(ids)}
        for name in ("logprobs", "ratios", "entropies"):
            given = want[name]
            arrays[name] = None if given is None else np.frombuffer(given, "<f4").tolist()
        arrays["turn_advantages"] = None
        assert got == want | arrays | {"completion": decoded(ids), "prompt_token_ids": [0, 1, 2]}


HOSTILE = [
    "<script>alert(1)</script>", "\x1b[2J\x1b]0;title\x07", "\u202egnp.exe", "\x00\x01", "",
    "line\u2028end\r\n", "\U0001f469\u200d\U0001f52c" * 50, "x" * 200_000, "\ufeff\ufffd",
]  # fmt: skip


def test_hostile_text_is_the_same_when_it_is_read(tmp_path):
    texts = [*HOSTILE, "half \ud800 of a pair"]
    columns = ("prompt", "verdict_reason", "task")
    rows = [row(i, **dict.fromkeys(columns, value)) for i, value in enumerate(texts)]
    for i, one in enumerate(rows):
        one["token_ids"] = np.full(4, i, "<i4").tobytes()
    one = RolloutWriter(tmp_path, 1e9, lambda ids: texts[ids[0]])
    one.write("step", 0, rows)
    one.close()
    table = read_rollouts(tmp_path)
    for column in (*columns, "completion"):
        assert table[column].to_pylist() == [*HOSTILE, "half \\ud800 of a pair"]


def test_evaluations_of_one_version_share_a_file_and_each_set_is_there_once(tmp_path):
    first, other = [row(0, set="aime")], [row(1), row(2)]
    write(tmp_path, ("eval", 8, first), ("eval", 8, other))
    write(tmp_path, ("eval", 8, [row(5, set="aime")]), resume_step=8)  # it was made again
    table = read_rollouts(tmp_path / "eval_000008.parquet", ["set", "index"])
    assert table.to_pylist() == [
        {"set": "", "index": 1}, {"set": "", "index": 2}, {"set": "aime", "index": 5},
    ]  # fmt: skip


def test_a_resumed_run_moves_the_files_behind_its_checkpoint_aside(tmp_path):
    folder = tmp_path / "rollouts"
    files = [(kind, step, [row(step=step)]) for step in (3, 4, 5) for kind in ("step", "eval")]
    write(folder, *files)
    write(folder, ("step", 4, [row(step=4, reward=-1.0)]), resume_step=4)
    kept = ["eval_000003", "eval_000004", "step_000003", "step_000004"]
    assert names(folder) == [f"{name}.parquet" for name in kept]
    moved = ["eval_000005.parquet", "step_000004.parquet", "step_000005.parquet"]
    assert names(tmp_path / "rollouts.dropped-0") == moved
    table = read_rollouts(folder / "step_000004.parquet")
    assert table["reward"].to_pylist() == [-1.0]
    write(folder)  # a new run in the old folder
    assert names(folder) == [] and len(names(tmp_path / "rollouts.dropped-1")) == 4


def test_the_oldest_steps_are_removed_and_evaluations_and_the_newest_step_stay(tmp_path):
    write(tmp_path, ("step", 0, [row(tokens=4000)]))
    size = (tmp_path / "step_000000.parquet").stat().st_size
    files = [("step", step, [row(tokens=4000)]) for step in range(1, 6)]
    write(tmp_path, ("eval", 0, [row()]), *files, max_bytes=2.5 * size, resume_step=9)
    assert names(tmp_path) == ["eval_000000.parquet", "step_000004.parquet", "step_000005.parquet"]
    write(tmp_path, ("step", 6, [row(tokens=4000)]), max_bytes=1, resume_step=9)
    assert names(tmp_path) == ["eval_000000.parquet", "step_000006.parquet"]


def test_a_full_disk_is_named_at_the_next_call_and_leaves_no_file(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one = writer(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    one.write("step", 1, [row()])
    with pytest.raises(DiskFull, match=r"step_000001\.parquet: free some space"):
        one.close()
    assert names(tmp_path) == []
    one = writer(tmp_path)
    one.write("step", 2, [row()])
    with pytest.raises(DiskFull, match="step_000002"):
        for _ in range(2000):  # as the event loop does
            one.check()
            time.sleep(0.01)


def test_a_slow_disk_is_seen_as_one(tmp_path, monkeypatch):
    sync, slow = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda fd: slow.append(time.sleep(0.5)) or sync(fd))
    one, began = writer(tmp_path), time.monotonic()
    for step in range(MAX_PENDING):
        assert one.check() == step
        one.write("step", step, [row()])
    assert one.check() == MAX_PENDING
    assert time.monotonic() - began < 0.5 * MAX_PENDING  # nothing waited
    one.close()
    assert not one.check() and len(slow) == MAX_PENDING == len(names(tmp_path))


KILLED = """
import pathlib, sys
from tests.metrics.test_rollouts import row, writer
one = writer(pathlib.Path(sys.argv[1]))
step = 0
while True:
    if not one.check():
        one.write("step", step, [row(i, tokens=10_000) for i in range(10)])
        step += 1
"""


def test_a_killed_writer_leaves_only_whole_files_and_the_next_removes_the_torn_one(tmp_path):
    folder = tmp_path / "rollouts"
    process = subprocess.Popen([sys.executable, "-c", KILLED, folder], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (
            folder.is_dir() and len(list(folder.glob("s*"))) > 1 and list(folder.glob(".*"))
        ):
            assert time.monotonic() < deadline and process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    whole = list(folder.glob("*.parquet"))
    assert len(whole) > 1
    for path in whole:
        assert read_rollouts(path).num_rows == 10
    (folder / ".step_000099.parquet.tmp-0123abcd").write_bytes(b"PAR1")  # torn
    assert read_rollouts(folder, ["index"]).num_rows == 10 * len(whole)
    write(folder, resume_step=10**6)
    assert names(folder) == sorted(path.name for path in whole)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="step_000001"):
        read_rollouts(tmp_path / "step_000001.parquet")
    assert read_rollouts(tmp_path).num_rows == 0
    path = tmp_path / "step_000002.parquet"
    parquet.write_table(pyarrow.table({"kind": ["train"]}), path)
    with pytest.raises(MetricsError, match=r"step_000002.*schema 'none', expected"):
        read_rollouts(path)


def old_file(path):
    """Write a file of the schema before ratios, entropies and origins."""
    batch = record_batch([row(i, completion="old", kind="eval", set="old") for i in range(3)])
    table = pyarrow.table(batch).drop_columns(["ratios", "entropies", "origins"])
    for name, value in (("forced_start", 1), ("forced_end", 3)):
        table = table.append_column(name, pyarrow.array([value] * 3, "int32"))
    metadata = {"schema": "megatron_rl.rollouts/1"}
    parquet.write_table(table.replace_schema_metadata(metadata), path)


def test_an_older_file_is_read_without_its_missing_columns_and_added_to(tmp_path):
    path = tmp_path / "eval_000008.parquet"
    old_file(path)
    table = read_rollouts(path)
    assert table.schema == arrow_schema() and table["index"].to_pylist() == [0, 1, 2]
    assert table["ratios"].to_pylist() == table["entropies"].to_pylist() == [None] * 3
    assert table["origins"].to_pylist() == [[0, 1, 1, 0]] * 3
    write(tmp_path, ("eval", 8, [row(4, kind="eval")]), resume_step=8)
    table = read_rollouts(tmp_path, ["entropies", "index", "completion"])
    assert table["index"].to_pylist() == [0, 1, 2, 4]
    assert table["completion"].to_pylist()[:3] == ["old"] * 3
    assert [one is None for one in table["entropies"].to_pylist()] == [True] * 3 + [False]


def test_the_disk_of_a_token_is_what_the_plan_counts(tmp_path):
    one = RolloutWriter(tmp_path, 1e9, lambda ids: "".join(f"w{i % 5000:x} " for i in ids))
    rows = [row(i, tokens=4000) for i in range(16)]  # 5.1 bytes of text a token
    for index, values in enumerate(rows):  # of 12 bits, as the trainer sends them
        rng = np.random.default_rng(index)
        for name, raw in (("ratios", rng.normal(1, 0.02, 4000)), ("entropies", rng.random(4000))):
            values[name] = (raw.astype("<f4").view("<u4") & np.uint32(0xFFFFF000)).tobytes()
    one.write("step", 0, rows)
    one.close()
    size = (tmp_path / "step_000000.parquet").stat().st_size / 16 / 4000
    assert 0.75 * BYTES_PER_TOKEN < size < BYTES_PER_TOKEN


def test_the_page_has_every_column_with_its_meaning():
    page = (ROOT / "docs" / "metrics.md").read_text()
    section = page.split("## Rollout files")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    assert rows == {name: f"{kind}: {doc}" for name, (kind, doc) in COLUMNS.items()}
