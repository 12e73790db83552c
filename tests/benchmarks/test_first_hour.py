"""The script of the first hour goes on after a part that fails or hangs, and says so.

Not exercised: a GPU, and the parts themselves, which have tests of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import first_hour
from benchmarks.first_hour import Part
from benchmarks.kernels import EAGER, FLOOR, OURS, Report, Table

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "first_hour_gpu.sh"
BIN = Path(sys.executable).parent
# As torchrun does: a child in a session of its own, which outlives its parent's process group.
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""  # noqa: E501
SUMMARY = {
    "logprob_error": {"mean": 0.01, "max": 0.2, "tokens": 5000},
    "pass_rate": {"first": {"value": 0.2}, "last": {"value": 0.6}},
    "tokens": 12000,
    "wall_seconds": {"rl": 10.0, "total": 90.0},
}


def part(name: str, code: str, seconds: float = 60, reason: str = "") -> Part:
    return Part(name, (sys.executable, "-c", code), seconds, first_hour._last_line(name), reason)


def test_a_part_that_fails_or_hangs_is_reported_and_the_next_ones_run(tmp_path: Path) -> None:
    chosen = [
        part("breaks", "print('no driver'); raise SystemExit(3)"),
        part("hangs", HANGS, 3),
        part("lacks", "raise SystemExit(4)", reason="no such tool"),
        part("works", "print('42 checks')"),
    ]
    environment = first_hour.environment_of({"gpu": "NVIDIA X1", "gib": 80.0, "cuda": "13.0"})
    assert first_hour.run_parts(chosen, tmp_path, environment) == 1
    results = json.loads((tmp_path / "first_hour.json").read_text())
    assert [(p["part"], p["status"]) for p in results["parts"]] == [
        ("breaks", "failed"),
        ("hangs", "timed out"),
        ("lacks", "not run"),
        ("works", "passed"),
    ]
    assert results["card"] == "NVIDIA X1, 80 GiB" and results["versions"]["torch"]
    table = (tmp_path / "first_hour.md").read_text()
    for line in ("exit status 3; no driver", "after 3 s", "no such tool", "42 checks", "2 failed"):
        assert line in table
    child = int((tmp_path / "hangs.log").read_text())
    # Where process 1 reaps no orphans, it stays in the table.
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert first_hour.run_parts(chosen[2:], tmp_path, environment) == 0


@pytest.mark.parametrize(("gpu", "gib"), [("", 0.0), ("NVIDIA L4", 24.0), ("NVIDIA H200", 139.0)])
def test_all_parts_together_take_less_than_twelve_minutes(gpu: str, gib: float) -> None:
    chosen = first_hour.parts(gpu, gib, Path("out"))
    assert sum(p.seconds for p in chosen) < 12 * 60
    on_gpu = "--device cuda" in " ".join(chosen[3].command)
    assert on_gpu == bool(gpu)


def test_the_script_lists_its_parts_and_starts_nothing(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    subprocess.run([BIN / "shellcheck", SCRIPT], check=True, timeout=60)
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        ["bash", SCRIPT, "--dry-run"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[1:]
    names = ["build", "doctor", "tests", "kernels", "sanitizer", "layers", "run"]
    assert [line.split()[0] for line in lines] == names
    assert not (tmp_path / "out").exists()


def test_the_kernels_line_has_the_floor_and_the_reason_why_a_variant_is_missing(
    tmp_path: Path,
) -> None:
    table = Table((64, 32, 1000), "cuda", missing=["Liger, kernels of the card: no cutlass"])
    table.first = {FLOOR: 1.0, OURS: 1.25, EAGER: 4.0}
    table.times = {OURS: [1.2, 1.1]}
    report = Report("cpu", tmp_path / "kernels.md", 1.0, [table])
    table.device = "cpu"  # the machine's name needs no GPU
    report.save()
    line = first_hour.kernel_times(tmp_path)
    assert line == "fused 1.100 s = 1.100 x floor; Liger, kernels of the card: no cutlass"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        ({}, ""),
        ({"mean": 0.05}, "must be at most 0.02"),
        ({"mean": float("nan")}, "must be at most 0.02"),
        ({"mean": 0.0, "tokens": 0}, "must be at most 0.02"),
    ],
)
def test_a_run_whose_log_probs_differ_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: dict[str, float], fault: str
) -> None:
    monkeypatch.setattr(first_hour, "RUN", tmp_path / "run")
    (tmp_path / "run").mkdir()
    summary = {**SUMMARY, "logprob_error": {**SUMMARY["logprob_error"], **error}}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    if fault:
        with pytest.raises(ValueError, match=fault):
            first_hour.one_gpu_run(tmp_path, 0.02)
    else:
        assert "pass rate 0.200 -> 0.600; 1,200 tokens/s" in first_hour.one_gpu_run(tmp_path, 0.02)
