"""One live run per folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import launch, run_lock
from megatron_rl.config import ConfigError
from megatron_rl.generator.supervisor import EngineStartError
from megatron_rl.orchestrator import RunError

HOLD = """
import sys, time
from pathlib import Path
from megatron_rl import run_lock
file = run_lock.hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


def test_a_second_start_is_refused_by_name_until_the_first_process_is_gone(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    who = f"process {holder.pid} on host {socket.gethostname()}, started 20.* UTC"
    for _ in range(2):  # being refused does not take the lock away
        (tmp_path / run_lock.FILE).read_text()  # nor does reading the file
        with pytest.raises(run_lock.FolderInUse, match=f"{who}.*stop that run.*output_dir"):
            run_lock.hold(tmp_path)
    holder.kill()
    holder.wait(10)
    run_lock.hold(tmp_path).close()


def test_ranks_that_torchrun_starts_again_after_a_refusal_do_not_take_the_folder_later(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "torchrun"
    for attempt in (0, 1):
        (logs / f"attempt_{attempt}" / "0").mkdir(parents=True)
        error = logs / f"attempt_{attempt}" / "0" / "error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error))
        with pytest.raises(run_lock.FolderInUse, match=f"process {holder.pid} on host"):
            run_lock.hold(tmp_path)
        holder.kill()
        holder.wait(10)
    other = tmp_path / "other" / "attempt_1" / "0" / "error.json"
    for file in (str(other), "/dev/null", ""):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
        run_lock.hold(tmp_path).close()


def test_a_start_that_is_refused_touches_nothing(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "checkpoints" / "step_000010").mkdir(parents=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip
    command = [sys.executable, "-m", "megatron_rl.cli", "train", "--output_dir", str(tmp_path)]
    command += ["--model", "tiny_dense", "--roles.trainer_ranks", "2"]
    second = subprocess.run(
        command, env=os.environ | ranks, capture_output=True, text=True, timeout=120, check=False
    )
    assert second.returncode == 2
    assert f"process {holder.pid} on host" in second.stderr
    assert "Traceback" not in second.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_process_that_a_run_starts_does_not_keep_its_folder(tmp_path: Path) -> None:
    file = run_lock.hold(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        file.close()
        run_lock.hold(tmp_path).close()
    finally:
        child.kill()
        child.communicate(timeout=10)


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    run_lock.hold(tmp_path).close()
    assert "a second start in this folder is not noticed" in capsys.readouterr().err


def test_an_error_that_ends_a_run_for_good_ends_the_next_ranks_of_the_same_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ranks(run: str, restart: int, rank: int = 0) -> str | None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        monkeypatch.setenv("RANK", str(rank))
        return run_lock.final_error(tmp_path)

    assert ranks("a", 0) is None
    run_lock.record_final_error(tmp_path, "SaveError: the disk is full")
    assert ranks("b", 1) is None
    assert [ranks("a", 1), ranks("a", 2, rank=3)] == ["SaveError: the disk is full"] * 2
    # Another torchrun may have the same id, as on Kubernetes: its first ranks begin anew.
    assert ranks("a", 0, rank=3) is None
    assert ranks("a", 1) is not None
    assert ranks("a", 0) is None
    assert ranks("a", 1) is None


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (ConfigError("x"), True),
        (RunError("x"), True),
        (FloatingPointError("x"), True),
        (EngineStartError("x"), True),
        (run_lock.FolderInUse("x"), False),  # the folder is another run's
        (ChildProcessError("killed"), False),
        (RuntimeError("gloo: connection reset by peer"), False),
    ],
)
def test_errors_that_a_restart_would_only_meet_again_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, final: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    launch.record_if_final(tmp_path, error)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    expected = f"{type(error).__name__}: {error}" if final else None
    assert run_lock.final_error(tmp_path) == expected


def test_ranks_after_such_an_error_end_before_they_import_much(tmp_path: Path) -> None:
    (tmp_path / run_lock.FINAL_ERROR_FILE).write_text('{"torchrun": "a", "error": "RunError: no"}')
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
             "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1",
             "TORCHELASTIC_ERROR_FILE": str(tmp_path / "torchrun.json")}  # fmt: skip
    code = f"""
import sys
from megatron_rl.cli import main
try:
    main(["train", "--output_dir", {str(tmp_path)!r}])
except SystemExit as end:
    print(end.code, [name for name in ("torch", "megatron", "vllm") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | ranks, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "2 []\n"
    assert done.stderr == "megatron-rl: not started again after RunError: no\n"
    summary = json.loads((tmp_path / "torchrun.json").read_text())
    assert summary["message"]["message"] == "not started again after RunError: no"
