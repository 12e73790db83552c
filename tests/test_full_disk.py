"""Every writer of a run on a file system that is full: the error has the path and the remedy."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from megatron_rl import run_lock
from megatron_rl.commands.convert import to_megatron
from megatron_rl.commands.convert.resumable import Output
from megatron_rl.commands.prepare import PrepareSettings, prepare
from megatron_rl.config import RunConfig, save_config
from megatron_rl.data.prompt_format import save_tiny_tokenizer
from megatron_rl.files import DiskFull
from megatron_rl.metrics import MetricsWriter
from megatron_rl.metrics.run_report import write_report
from megatron_rl.models import start_checkpoint, tiny
from megatron_rl.trainer import hf_checkpoint, sft

SIZE = 2**21
"""Bytes of the file system; what is written is smaller, except for models."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Mount a file system with folders and a file that were there before it was full."""
    folder = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        for name in ("run", "start", "data", "made"):
            (folder / name).mkdir()
        with closing(MetricsWriter(folder / "run" / "metrics.jsonl")) as writer:
            writer.write("step", {"step": 0})
        file = os.open(folder / "filling", os.O_CREAT | os.O_WRONLY)
        with pytest.raises(OSError, match="No space left"):
            while True:
                os.write(file, bytes(4096))
        os.close(file)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def configuration(disk: Path) -> RunConfig:
    return RunConfig(output_dir=disk / "run", model="tiny_dense")


def hold(disk: Path) -> None:
    run_lock.hold(disk / "start").close()


def add_rows(disk: Path) -> None:
    with closing(MetricsWriter(disk / "run" / "metrics.jsonl", resume_step=1)) as writer:
        for step in range(1, 9):
            writer.write("step", {"step": step, "text": "x" * 4096})


def report(disk: Path) -> None:
    file = disk / "run" / "metrics.jsonl"
    write_report(disk / "start", file, phases={}, fit_compute="tokens", versions={})


def save_model(disk: Path) -> None:
    hf_checkpoint.write(disk / "final", disk, iter([("a", torch.zeros(SIZE))]))


def convert(disk: Path) -> None:
    model = tiny.create("tiny_dense", disk.with_name("model"), save_tiny_tokenizer)
    to_megatron.convert(model, Output(disk / "converted", 10**9, quiet=True))


def prepare_data(disk: Path) -> None:
    source = disk.with_name("rows.jsonl")
    rows = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(400)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(PrepareSettings(str(source), "sums", heldout=1), disk / "data")


def row_of_the_supervised_stage(disk: Path) -> None:
    feed = type("Feed", (), {"position": type("Position", (), {"epoch": 0, "dropped": 0})})
    (disk / "run" / "sft.jsonl").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "replace_file", lambda *_: None)
        write = sft._report(configuration(disk), feed(), 0)  # type: ignore[arg-type]
    for step in range(9):
        write({"step": step, "loss": 0.0, "text": "x" * 4096})


WRITERS: dict[str, Callable[[Path], object]] = {
    "run/config.yaml": lambda disk: save_config(configuration(disk)),
    "start/run.lock": hold,
    "run/metrics.jsonl": add_rows,
    "start/summary.json": report,
    "final": save_model,
    "made": lambda disk: tiny.create("tiny_dense", disk / "made"),
    f"start/{start_checkpoint.MADE_BY}": (
        lambda disk: start_checkpoint.mark_made(configuration(disk), disk / "start")
    ),
    "converted": convert,
    "data": prepare_data,
    "run/sft.jsonl": row_of_the_supervised_stage,
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_error_of_a_full_disk_names_the_path_and_the_remedy(disk: Path, name: str) -> None:
    with pytest.raises(DiskFull) as error:
        WRITERS[name](disk)
    path = rf"{disk}/(\.?{re.escape(name)}\S*)"
    remedy = r"free some space there, and start it again \(a run with --resume\)"
    assert re.fullmatch(
        rf"\[Errno 28\] No space left on device: {path}: {remedy}", str(error.value)
    )
