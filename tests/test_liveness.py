"""Signs of life: what ranks write, and what `megatron-rl alive` makes of it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from megatron_rl import liveness
from megatron_rl.cli import app
from megatron_rl.config import RunConfig
from megatron_rl.config.sections import Timeouts

LIMIT = 300.0
"""Seconds until the next sign, in the tests that write signs themselves."""


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this node's signs; no rank of this process has begun."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setenv(liveness.FOLDER, str(folder))
    monkeypatch.setattr(liveness, "_signer", None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return folder


def alive(*arguments: str | Path) -> tuple[int, str]:
    """Return exit status and output of the command, in this process."""
    done = CliRunner().invoke(app, ["alive", *map(str, arguments)])
    return done.exit_code, done.stdout


def put(
    node: Path, run: Path, local_rank: int = 0, age: float = 1.0, gone: bool = False, **own: object
) -> Path:
    """Write the sign of a rank, which is this process or gone; return its file."""
    born = -2 if gone else liveness._process(os.getpid())[1]
    values = {"run": str(run), "role": "trainer", "rank": local_rank, "host": "here",
              "pid": os.getpid(), "born": born, "incarnation": 0, "state": "training", "step": 4,
              "time": time.time() - age, "limit": LIMIT, **own}  # fmt: skip
    path = node / f"{liveness.run_prefix(run)}{local_rank}.json"
    path.write_bytes(msgspec.json.encode(values))
    return path


def last(node: Path) -> liveness.Sign:
    """Return the only sign of a node."""
    (sign,) = liveness.signs(node).values()
    assert sign is not None
    return sign


def test_a_sign_says_what_the_rank_did_last_and_how_long_it_may_be_silent(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    t = Timeouts()
    liveness.begin(RunConfig(output_dir=tmp_path / "run"), "trainer", 0)
    first = last(node)
    assert (first.state, first.limit) == ("starting", t.startup_seconds + t.shutdown_seconds)
    assert (first.run, first.incarnation) == (str(tmp_path / "run"), 2)
    liveness.sign("training", 7)
    sign = last(node)
    assert (sign.role, sign.rank, sign.pid, sign.step) == ("trainer", 0, os.getpid(), 7)
    assert sign.limit == t.batch_seconds + t.startup_seconds + t.shutdown_seconds
    assert sign.process() == "R"
    assert abs(time.time() - sign.time) < 60
    # Rank 0's is in the run's folder, too, for other nodes.
    assert liveness.signs(tmp_path / "run") == {tmp_path / "run" / "alive.json": sign}
    liveness.sign("ended")
    assert (last(node).state, last(node).step) == ("ended", 7)


def test_every_state_has_time_outs_of_the_configuration() -> None:
    assert {x for names in liveness.BOUNDS.values() for x in names} <= {*Timeouts.model_fields}
    assert [state for state, names in liveness.BOUNDS.items() if not names] == ["ended"]


def test_a_state_is_written_once_a_second_and_a_new_one_at_once(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(liveness.time, "time", lambda: now)
    liveness.begin(RunConfig(output_dir=tmp_path / "run"), "trainer", 1)
    for step in range(4):
        liveness.sign("training", step)
    assert last(node).step == 0
    now += 1.0
    liveness.sign("training", 4)
    assert last(node).step == 4
    liveness.sign("saving", 5)
    assert (last(node).state, last(node).step) == ("saving", 5)
    # A generator that waits may have its next request in a moment.
    liveness.sign("generating", 6)
    liveness.sign("waiting", 6)
    assert last(node).state == "generating"
    now += 1.0
    liveness.sign("waiting", 6)
    assert last(node).state == "waiting"


def test_torchrun_has_as_long_to_restart_a_rank_that_is_gone(node: Path, tmp_path: Path) -> None:
    put(node, tmp_path / "run", age=LIMIT - 30, gone=True)
    assert alive()[0] == 0
    put(node, tmp_path / "run", age=LIMIT + 30, gone=True)
    status, text = alive()
    assert status == 1
    assert "(on here)" in text
    put(node, tmp_path / "run", age=LIMIT + 30, gone=True, host=os.uname().nodename)
    assert "(gone)" in (text := alive()[1])
    assert "(gone), its log and the kernel's" in text


def test_a_dead_run_counts_where_no_other_lives(node: Path, tmp_path: Path) -> None:
    dead, lives = tmp_path / "dead", tmp_path / "lives"
    put(node, dead, age=LIMIT + 30, gone=True)
    put(node, lives)
    assert alive()[0] == 0
    assert alive(dead)[0] == 1
    put(node, lives, age=LIMIT + 1)
    assert alive()[1].startswith(f"{lives}: trainer rank 0: training at step 4, 301 s ago")


def test_one_rank_that_hangs_is_not_hidden_by_others_of_its_node(
    node: Path, tmp_path: Path
) -> None:
    put(node, tmp_path / "run", 0)
    put(node, tmp_path / "run", 1, age=LIMIT + 1, role="generator", rank=9, state="generating")
    put(node, tmp_path / "run", 2)
    status, text = alive()
    assert status == 1
    assert "generator rank 9: generating at step 4" in text


def test_two_runs_on_a_node_do_not_answer_for_each_other(node: Path, tmp_path: Path) -> None:
    hangs, trains = tmp_path / "hangs", tmp_path / "trains"
    put(node, hangs, age=LIMIT + 1)
    put(node, trains)
    status, text = alive(trains)
    assert status == 0
    assert text.startswith(f"{trains}: trainer rank 0: training")
    for arguments in ([hangs], []):
        status, text = alive(*arguments)
        assert status == 1
        assert text.startswith(f"{hangs}: trainer rank 0: training at step 4, 301 s ago (")
    put(node, hangs)
    assert alive()[1].count("\n") == 2


def test_a_run_that_begins_removes_what_is_over_and_nothing_else(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    # On this node, local rank 0 has work this time, and local rank 3 none.
    removed = [
        put(node, mine, 3, gone=True),
        put(node, other, 1, gone=True, state="ended"),
        put(node, other, 2, gone=True, age=LIMIT + 1),
        put(node, other, 3),
    ]
    removed[-1].write_text("{")
    kept = [
        put(node, mine, 1),
        put(node, other, 4, age=LIMIT + 1),
        put(node, other, 5, gone=True),  # torchrun may be about to start it again
        put(node, other, 6, state="ended"),
    ]
    monkeypatch.setenv("LOCAL_RANK", "0")
    liveness.begin(RunConfig(output_dir=mine), "generator", 8)
    own = node / f"{liveness.run_prefix(mine)}0.json"
    assert {*node.iterdir()} == {own, *kept}


def test_a_run_that_has_ended_is_no_failure(node: Path, tmp_path: Path) -> None:
    put(node, tmp_path / "run", age=10 * LIMIT, gone=True, state="ended", limit=0.0)
    for arguments in ([], [tmp_path / "run"]):
        status, text = alive(*arguments)
        assert status == 0
        assert "trainer rank 0: ended at step 4" in text


def test_a_damaged_file_is_no_sign_until_the_rank_writes_it_again(
    node: Path, tmp_path: Path
) -> None:
    liveness.begin(RunConfig(output_dir=tmp_path / "run"), "trainer", 0)
    (path,) = node.iterdir()
    for content in (b"", b'{"run": "/a", "state": "tra', b'{"run": 1}', b"\xff\xfe[]"):
        path.write_bytes(content)
        status, text = alive()
        assert status == 1
        assert text.startswith(f"{path} holds no sign")
        assert alive(tmp_path / "another")[0] == 1
    liveness.sign("training", 1)
    assert alive()[0] == 0


def test_on_another_node_the_runs_folder_has_the_sign_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    liveness.begin(RunConfig(output_dir=run), "trainer", 0)
    monkeypatch.setenv(liveness.FOLDER, str(tmp_path / "elsewhere"))
    assert alive()[0] == 1
    assert alive(run)[0] == 0
    for changes, expected, part in (
        ({"age": LIMIT + 1, "host": "node-7", "gone": True}, 1, "(on node-7)"),
        ({"age": LIMIT + 1, "state": "ended"}, 0, "ended at step 4"),
    ):
        put(tmp_path, run, **changes).replace(run / "alive.json")
        status, text = alive(run)
        assert status == expected
        assert part in text


def test_without_a_run_it_says_so_and_an_image_may_be_idle(node: Path, tmp_path: Path) -> None:
    for arguments, expected in ([], 1), (["--idle-ok"], 0), ([tmp_path / "none"], 1):
        status, text = alive(*arguments)
        assert status == expected
        assert text == f"no run has signed in {node} ({liveness.FOLDER} names another)\n"


def test_a_number_that_another_process_has_now_is_not_the_ranks(node: Path, tmp_path: Path) -> None:
    liveness.begin(RunConfig(output_dir=tmp_path / "run"), "trainer", 0)
    sign = last(node)
    assert sign.process() == "R"
    assert msgspec.structs.replace(sign, born=sign.born - 1).process() == ""
    assert liveness.born(os.getpid()) == sign.born
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    born = liveness._process(zombie.pid)[1]
    assert msgspec.structs.replace(sign, pid=zombie.pid, born=born).process() == ""
    assert liveness.born(zombie.pid) == -1
    zombie.wait()


def test_a_folder_that_cannot_be_written_stops_the_start_and_only_warns_later(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(output_dir=tmp_path / "run")
    (tmp_path / "file").touch()
    monkeypatch.setenv(liveness.FOLDER, str(tmp_path / "file" / "node"))
    with pytest.raises(OSError, match=f"file/node.*: set {liveness.FOLDER} to a folder"):
        liveness.begin(config, "generator", 1)
    monkeypatch.setenv(liveness.FOLDER, str(node))
    liveness.begin(config, "generator", 1)
    for path in node.iterdir():
        path.unlink()
    node.rmdir()
    liveness.sign("generating", 1)
    liveness.sign("generating", 2)
    assert capsys.readouterr().err.count("warning: megatron-rl alive will not see this rank") == 1


def test_a_probe_imports_little_and_takes_a_fraction_of_a_second_of_cpu() -> None:
    code = """
import sys
from megatron_rl.cli import main
try:
    main(["alive", "--idle-ok"])
except SystemExit as end:
    heavy = {"torch", "numpy", "yaml", "megatron_rl.config"} & sys.modules.keys()
    sys.exit(f"{end.code} {sorted(heavy)}")
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr == "0 []\n"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
