"""Trainer ranks that resume: from a damaged checkpoint, and after an end in a long step."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.data.prompt_format import save_tiny_tokenizer
from tests.trainer.cases import write_model
from tests.trainer.resume_worker import RANKS, wait_for
from tests.trainer.test_checkpoint import cut, flip
from tests.workers import PRELOADED, exit_code

WORKER = "tests.trainer.resume_worker"
SECONDS = 120


def run(folder: Path, **case: Any) -> tuple[int | str, str]:
    """Run the ranks of a case; return a rank's exit code and the output of all."""
    store = f"store{len(list(folder.glob('store*')))}"
    case = {"resume": False, "last": 5, "save_at": [2, 4], "store": store, **case}
    (folder / "trained.json").unlink(missing_ok=True)
    (folder / "case.json").write_text(json.dumps(case))
    code = exit_code(WORKER, RANKS, folder, SECONDS, PRELOADED)
    return code, (folder / "ranks.log").read_text()


def trained(folder: Path) -> list[int]:
    steps: list[int] = json.loads((folder / "trained.json").read_text())
    return steps


def steps(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "out" / "checkpoints").glob("step_*"))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of a run with checkpoints of steps 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("run")
    save_tiny_tokenizer(write_model(folder / "model", "tiny_dense"))
    code, log = run(folder)
    assert code == 0, log
    assert trained(folder) == [0, 1, 2, 3, 4]
    assert steps(folder) == ["step_000002", "step_000004", "step_000005"]
    return folder


@pytest.mark.parametrize(
    ("name", "damaging", "seen"),
    [
        ("model/__1_0.distcp", cut, r"it has [\d,]+ of [\d,]+ bytes"),
        ("model/__0_0.distcp", flip, r"its bytes were changed after it was written \(checksum\)"),
        ("state.msgpack", Path.unlink, "No such file or directory"),
    ],
)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    ended: Path, tmp_path: Path, name: str, damaging: Callable[[Path], None], seen: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(ended, folder)
    newest = folder / "out" / "checkpoints" / "step_000005"
    damaging(newest / name)
    problem = f"{newest / name}: {seen}"
    if damaging is flip:  # chosen by its step, a damaged one is an error
        code, log = run(folder, resume=5, last=7)
        assert code != 0
        assert re.search(
            f"ConfigError: resume is 5: {problem}; --resume STEP takes another: 2, 4", log
        )
        assert steps(folder) == ["step_000002", "step_000004", "step_000005"]
    code, log = run(folder, resume=True, last=7)
    assert code == 0, log
    assert re.search(f"{problem}: {newest} is damaged and passed over", log)
    assert trained(folder) == [4, 5, 6]


def test_restarted_ranks_pass_over_a_damaged_checkpoint(
    ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start had no `--resume`, or chose a step: restarted ranks take the newest."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    folder = tmp_path / "run"
    shutil.copytree(ended, folder)
    flip(folder / "out" / "checkpoints" / "step_000005" / "model" / "__1_0.distcp")
    code, log = run(folder, resume=False, last=6)
    assert code == 0, log
    assert "step_000005 is damaged and passed over" in log
    assert trained(folder) == [4, 5]


@pytest.mark.parametrize("failing", [[], [1]], ids=["SIGTERM", "error"])
def test_a_save_in_progress_is_completed_while_ranks_are_ended_in_a_long_step(
    ended: Path, tmp_path: Path, failing: list[int]
) -> None:
    """The end comes before a byte of the checkpoint is written: the host copies still become one.

    The ranks are in the step until they are killed, or until one has failed.
    """
    shutil.copytree(ended / "model", tmp_path / "model")
    final = tmp_path / "out" / "checkpoints" / "step_000002"
    with ThreadPoolExecutor(1) as thread:
        ranks = thread.submit(run, tmp_path, failing=failing)
        pids = []
        for rank in range(RANKS):
            wait_for(tmp_path / f"in_step{rank}", SECONDS)
            pids.append(int((tmp_path / f"in_step{rank}").read_text()))
        assert not final.exists()
        if not failing:
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
        (tmp_path / "go").touch()
        wait_for(final, SECONDS)
        if not failing:
            assert not ranks.done()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        code, log = ranks.result(SECONDS)
    assert code != 0, log
    code, log = run(tmp_path, resume=True)
    assert code == 0, log
    assert trained(tmp_path) == [2, 3, 4]
