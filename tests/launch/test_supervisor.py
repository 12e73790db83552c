"""Generator ranks keep the processes of engines running, over restarts of the ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_rl import liveness
from megatron_rl.config import RunConfig
from tests.launch.supervisor_process import ADDRESS, write_python

ROOT = Path(__file__).resolve().parents[2]
FOREVER = "ready forever"


class Node:
    """A node's folder, on which supervisors are started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, write_python(folder)
        self.config = RunConfig(
            output_dir=folder / "run", roles={"trainer_ranks": 2},
            timeouts={"shutdown_seconds": 2.0}, fleet={"generator_restarts": 2},
        )  # fmt: skip
        self.errors = folder / "errors.txt"
        self.started: list[subprocess.Popen[bytes]] = []

    def start(
        self, *acts: str, restart: int = 0, restarts: int = 3, shell: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start the rank of an incarnation; engines act so, one line for each start."""
        if acts:
            (self.folder / "acts").write_text("\n".join(acts))
        command = [sys.executable, "-m", "tests.launch.supervisor_process",
                   self.config.model_dump_json(), str(self.python)]  # fmt: skip
        if shell:  # in the place of torchrun
            command = ["bash", "-c", '"$@"; wait', "agent", *command]
        environment = os.environ | {
            liveness.FOLDER: str(self.folder / "node"),
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        }
        with self.errors.open("ab") as errors:
            started = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors)
        self.started.append(started)
        return started

    def engines(self) -> list[int]:
        """Return the process ids of all starts so far."""
        path = self.folder / "started"
        return [int(x.split()[0]) for x in path.read_text().splitlines()] if path.exists() else []

    def engine(self, number: int) -> psutil.Process:
        """Return the engine of this start, once its record says that it is ready."""
        wait_for(lambda: len(self.engines()) > number)
        (lock,) = (self.folder / "node").glob("*.lock")
        pid = self.engines()[number]
        wait_for(lambda: json.loads(lock.read_bytes())["pid"] == pid)
        wait_for(lambda: json.loads(lock.read_bytes())["ready"])
        return psutil.Process(pid)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    (tmp_path / "stop").touch()
    for pid in node.engines():
        for process in psutil.process_iter():
            if process.is_running() and _session(process.pid) == pid:
                process.kill()
    for process in node.started:
        process.kill()
        process.wait(20)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def test_an_engine_that_is_killed_is_started_again_and_its_end_is_the_ranks(node: Node) -> None:
    rank = node.start(FOREVER, FOREVER)
    first = node.engine(0)
    assert _session(first.pid) == first.pid  # torchrun's signals to groups do not reach it
    endpoint = (node.folder / "started").read_text().partition(" ")[2]
    assert json.loads(endpoint) == {"endpoint": ADDRESS}
    first.kill()
    assert node.engine(1).pid != first.pid
    (node.folder / "stop").touch()
    assert rank.wait(60) == 0
    text = node.errors.read_text()
    assert (
        "generator-0 was killed by signal 9 (SIGKILL); its log has the cause; it is started" in text
    )
    assert "again (1 of 2)" in text


def test_an_engine_that_hangs_is_killed_and_started_again(node: Node) -> None:
    node.config.timeouts.silence_seconds = 1.0
    rank = node.start(FOREVER, "ready works")
    hanging = node.engine(0)
    working, started = node.engine(1), time.monotonic()
    assert not hanging.is_running()
    text = node.errors.read_text()
    assert f"generator-0 (process {hanging.pid}) shows no life for 4 s" in text
    while time.monotonic() - started < 6:
        assert working.is_running()
        time.sleep(0.1)
    (node.folder / "stop").touch()
    assert rank.wait(60) == 0


def test_an_engine_that_ends_too_often_ends_the_rank_with_its_error(node: Node) -> None:
    rank = node.start("ready killed", "error", "ready error", FOREVER)
    assert rank.wait(60) == 1
    assert len(node.engines()) == 3
    last = node.errors.read_text().splitlines()[-1]
    assert last == (
        "RuntimeError: generator-0 ended with exit status 1: WeightsError: torn; it was started"
        " again 2 times within 600 s (fleet.generator_restarts)"
    )


def test_an_engine_that_cannot_start_in_a_new_run_is_not_tried_again(node: Node) -> None:
    assert node.start("error", FOREVER).wait(60) == 1
    assert len(node.engines()) == 1
    assert (
        "EngineStartError: generator-0 ended with exit status 1: WeightsError: torn"
        in (node.errors.read_text().splitlines()[-1])
    )
    # In a run that has worked, the fault may be of the moment.
    rank = node.start("error", "error", FOREVER, restart=1)
    assert node.engine(2).is_running()
    rank.kill()


def test_an_engine_outlives_restarts_of_the_ranks_and_is_taken_over(node: Node) -> None:
    rank = node.start(FOREVER)
    engine = node.engine(0)
    for restart, number in ((1, signal.SIGTERM), (2, signal.SIGKILL), (3, signal.SIGTERM)):
        rank.send_signal(number)
        started = time.monotonic()
        rank.wait(60)
        assert time.monotonic() - started < 2
        rank = node.start(restart=restart, restarts=4)
        wait_for(lambda: node.errors.read_text().count("goes on") == restart)  # noqa: B023
    assert engine.is_running()
    assert node.engines() == [engine.pid]
    (node.folder / "stop").touch()
    assert rank.wait(60) == 0
    engine.wait(60)


def test_an_adopted_engine_that_is_killed_is_started_again(node: Node) -> None:
    rank = node.start(FOREVER, FOREVER)
    engine = node.engine(0)
    rank.kill()
    rank.wait(60)
    rank = node.start(restart=1)
    wait_for(lambda: "goes on" in node.errors.read_text())
    engine.kill()
    assert node.engine(1).is_running()
    assert "generator-0 was killed; its log has the cause" in node.errors.read_text()
    rank.kill()


def test_an_engine_that_is_killed_while_no_rank_watches_is_named_and_started_again(
    node: Node,
) -> None:
    rank = node.start(FOREVER, FOREVER)
    engine = node.engine(0)
    rank.kill()
    rank.wait(60)
    engine.kill()
    rank = node.start(restart=1)
    assert node.engine(1).is_running()
    text = node.errors.read_text()
    assert "generator-0 was killed; its log has the cause; it is started again" in text
    rank.kill()


@pytest.mark.parametrize("act", ["ready forever", "stubborn ready forever"])
def test_with_the_last_restart_the_engine_ends_with_all_of_its_session(
    node: Node, act: str
) -> None:
    rank = node.start(act, restart=3)
    engine = node.engine(0)
    family = [engine, *engine.children()]
    assert len(family) == 1 + ("stubborn" in act)
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(60) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


def test_without_torchrun_the_engine_ends(node: Node) -> None:
    agent = node.start(FOREVER, shell=True)
    engine = node.engine(0)
    agent.kill()
    engine.wait(60)


def test_a_process_that_torchrun_left_alone_ends_by_itself(tmp_path: Path) -> None:
    agent = subprocess.Popen(["sleep", "600"])
    command = [sys.executable, "-m", "megatron_rl.cli", "generate", "--join", str(tmp_path)]
    process = subprocess.Popen([*command, "--agent", str(agent.pid)], cwd=ROOT)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(6)
        agent.kill()
        agent.wait()
        assert process.wait(30) == 0
    finally:
        agent.kill()
        process.kill()
        process.wait()
