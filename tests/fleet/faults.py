"""Faults of a run: the moment to wait for, what is done to which process, and the signs of it.

A point is `ACTION:ROLE:MOMENT`, as `kill:core-0:updating`.

    kill       SIGKILL
    stop<n>    SIGSTOP, and SIGCONT after n seconds
    stop       SIGSTOP for ever
    cut        the kernel aborts the TCP connections of the process (of ROLE `all`: of the run)
    term       SIGTERM
    int        SIGINT (of the agent: Ctrl-C)
    second     another start in the same folder; ROLE `pids`: with process numbers of its own
    join       so many generators (ROLE) join by themselves, as `joined0`, `joined1`, ...
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from tests.fleet.tiny_run import SILENCE, TinyRun

EVALUATED_EVERY = 5
MOMENT_SECONDS, NOTICE_SECONDS, RECOVERY_SECONDS = 400.0, 60.0, 400.0
TRAINERS = ("rank", "orchestrator", "supervisor")
ENDS_RUN = {("kill", "agent"), ("term", "agent"), ("int", "agent")}
"""Faults after which the run is resumed by another start."""


@dataclass
class Fault:
    """One fault and its course."""

    point: str
    noticed: float | None = None
    """Seconds until the log named the loss."""
    recovered: float | None = None
    """Seconds until the run was as before."""
    problem: str = ""
    line: str = ""
    """Line of the log that names it."""

    def __post_init__(self) -> None:
        self.action, self.role, self.moment = self.point.split(":")
        self.seconds = float(self.action[4:] or "inf") if self.action.startswith("stop") else 0.0

    @property
    def ends_run(self) -> bool:
        """True if the run ends, and another start resumes it."""
        return (self.action, self.role) in ENDS_RUN

    @property
    def is_short(self) -> bool:
        """True if nobody may notice it."""
        return self.action in ("cut", "second") or 0 < self.seconds < SILENCE / 2

    def run(self, run: TinyRun) -> None:
        """Wait for the moment, inject, wait until the run has recovered; set `problem`."""
        try:
            self._run(run)
        except (TimeoutError, AssertionError) as e:
            self.problem = f"{e}"

    def _run(self, run: TinyRun) -> None:
        if self.action != "join":
            MOMENTS[self.moment](run, self.role)
        start, self.log_start = time.monotonic(), len(run.log.read_bytes())
        before = _Before(run)
        self._inject(run)
        if not self.is_short and not self.ends_run and self.action not in ("term", "join"):
            self._until(
                run, lambda: self._named(run), NOTICE_SECONDS, "nothing in the log names it"
            )
            assert self.line, "nothing in the log names it before the run's end"
            self.noticed = time.monotonic() - start
        if self.ends_run:
            self._until(run, lambda: not run.processes(), RECOVERY_SECONDS, "processes live on")
        else:
            if 0 < self.seconds < math.inf:
                time.sleep(max(start + self.seconds - time.monotonic(), 0))
                if self.role.startswith(TRAINERS):  # it goes on from here
                    before.steps = run.steps
            recovered = before.recovery(self)
            self._until(run, recovered, RECOVERY_SECONDS, "the run has not recovered")
            lost = len(run.events("generator_lost")) - before.lost
            assert not (self.is_short and lost), "a generator was lost"
        self.recovered = time.monotonic() - start

    def _until(
        self, run: TinyRun, condition: Callable[[], object], seconds: float, text: str
    ) -> None:
        agent = run.agent
        assert agent is not None

        def over() -> bool:
            ended = agent.poll() is not None and not self.ends_run
            return bool(condition()) or ended

        if not run.wait(over, seconds):
            raise TimeoutError(f"{text} within {seconds:g} s")
        if not condition() and run.steps < run.total:
            raise AssertionError(f"{text}: the run ended with exit status {agent.returncode}")

    def _named(self, run: TinyRun) -> bool:
        text = run.text(self.log_start)
        for line in text.splitlines():
            if re.search(self.pattern, line):
                self.line = line.strip()
                return True
        return False

    def _inject(self, run: TinyRun) -> None:
        if self.action == "second":
            self._second(run)
            return
        if self.action == "join":
            for _ in range(int(self.role)):
                run.join()
            return
        process = None if self.role == "all" else _process(run, self.role)
        self.pattern = _pattern(self.role, process.pid if process else 0)
        if self.action == "cut":
            cut(run, process)
            return
        assert process is not None
        if self.action.startswith("stop"):
            process.send_signal(signal.SIGSTOP)
            if self.seconds < math.inf:
                threading.Timer(self.seconds, _continue, (process,)).start()
            return
        kinds = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
        process.send_signal(kinds[self.action])

    def _second(self, run: TinyRun) -> None:
        start = len(run.log.read_bytes())
        second = run.start_second(own_pids=self.role == "pids")
        try:
            status = second.wait(120)
        except subprocess.TimeoutExpired:
            raise TimeoutError("the second start goes on") from None
        assert status != 0, "the second start was accepted"
        assert "writes to this folder" in run.text(start), "the second start names no run"


class _Before:
    """The state of a run before a fault."""

    def __init__(self, run: TinyRun) -> None:
        self._run = run
        self.ready, self.steps = len(run.events("generator_ready")), run.steps
        self.left = len(run.events("generator_left"))
        self.lost = len(run.events("generator_lost"))
        self.start = self._start()

    def _start(self) -> tuple[int, int]:
        path = self._run.output / "metrics.jsonl"
        inode = path.stat().st_ino if path.exists() else 0
        return inode, len(self._run.events("resumed"))

    def recovery(self, fault: Fault) -> Callable[[], bool]:
        """Return the condition of a run that goes on as before."""
        if fault.is_short:
            return self._goes_on
        if fault.action == "term":
            return lambda: self._left(fault)
        if fault.action == "kill" and fault.role.startswith("joined"):  # it does not come back
            return self._goes_on
        if fault.role.startswith(TRAINERS):
            return self._trains_again if fault.seconds in (0, math.inf) else self._goes_on
        ready = self.ready + (int(fault.role) if fault.action == "join" else 1)
        return lambda: len(self._run.events("generator_ready")) >= ready

    def _goes_on(self) -> bool:
        return self._run.steps >= min(self.steps + 2, self._run.total)

    def _left(self, fault: Fault) -> bool:
        status = self._run.status(fault.role)
        assert status in (None, 0), f"{fault.role} left with exit status {status}"
        return status == 0 and len(self._run.events("generator_left")) > self.left

    def _trains_again(self) -> bool:
        if self._start() == self.start:
            return False
        rows = self._run.rows
        last = max((i for i, row in enumerate(rows) if row.get("event") == "resumed"), default=0)
        return any(row["kind"] == "step" for row in rows[last:]) or self._run.steps >= (
            self._run.total
        )


def _continue(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def _pattern(role: str, pid: int) -> str:
    if role.startswith(("generator", "core", "joined")):
        return r"generator-\S+ .*(is lost|started again|was killed)"
    if role == "orchestrator":
        return r"(Gone|Error): the orchestrator (ended|failed|did not start)|orchestrator .*silent"
    rank = role.removeprefix("rank")
    return rf"\(pid: {pid}\)|trainer rank {rank} (is|was) silent"


def _process(run: TinyRun, role: str) -> psutil.Process:
    if not run.wait(lambda: role in run.roles(), MOMENT_SECONDS):
        raise TimeoutError(f"no process has the role {role}: {sorted(run.roles())}")
    return run.roles()[role]


def connections(process: psutil.Process) -> set[tuple[int, int]]:
    """Return the ports (own, other) of the established TCP connections of a process."""
    pairs = set()
    with contextlib.suppress(psutil.Error):
        for c in process.net_connections("tcp"):
            if c.status == psutil.CONN_ESTABLISHED:
                pairs.add((c.laddr.port, c.raddr.port))
    return pairs


def cut(run: TinyRun, process: psutil.Process | None) -> None:
    """Abort the connections of a process, or of all, to the orchestrator."""
    endpoint = json.loads((run.output / "orchestrator.json").read_text())["endpoint"]
    port = int(endpoint.rpartition(":")[2])
    pairs = set()
    for each in [process] if process is not None else run.processes():
        pairs |= {pair for pair in connections(each) if port in pair}
    assert pairs, "there is no connection to cut"
    for own, other in pairs:
        command = ["ss", "-K", "-tn", "sport", "=", f":{own}", "and", "dport", "=", f":{other}"]
        subprocess.run(command, capture_output=True, check=True)


def can_cut() -> bool:
    """Return True if the kernel aborts connections for this process."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as client,
        ):
            port = client.getsockname()[1]
            subprocess.run(["ss", "-K", "-tn", "sport", "=", f":{port}"], capture_output=True)
            time.sleep(0.1)
            client.settimeout(1)
            client.send(b"x")
            return client.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


# ---------------------------------------------------------------- moments
def _until(run: TinyRun, condition: Callable[[], object], poll: float = 0.005) -> None:
    agent = run.agent
    assert agent is not None
    if not run.wait(lambda: condition() or agent.poll() is not None, MOMENT_SECONDS, poll):
        raise TimeoutError(f"the moment has not come within {MOMENT_SECONDS:g} s")
    assert agent.poll() is None, f"the run ended with exit status {agent.returncode} before"


def _next_step(run: TinyRun) -> None:
    steps = run.steps
    _until(run, lambda: run.steps > steps)


def _decoding(run: TinyRun, role: str) -> None:
    _next_step(run)
    time.sleep(0.02)


def _updating(run: TinyRun, role: str) -> None:
    _next_step(run)
    time.sleep(0.1)


def _publishing(run: TinyRun, role: str) -> None:
    _next_step(run)


def _checkpoint(run: TinyRun, role: str) -> None:
    folder = run.output / "checkpoints"
    _until(run, lambda: any(folder.glob("*.tmp")), poll=0.002)


def _evaluation(run: TinyRun, role: str) -> None:
    def running() -> bool:
        steps = run.steps
        done = {row["step"] for row in run.rows if row["kind"] == "eval"}
        return steps > 0 and steps % EVALUATED_EVERY == 0 and steps not in done

    _next_step(run)
    _until(run, running)
    time.sleep(0.05)


def _waiting(run: TinyRun, role: str) -> None:
    """While the generator has no work, since the trainer does not go on."""
    from megatron_rl import liveness

    def waits() -> bool:
        for folder in run.temporary.glob("megatron_rl_*"):
            for sign in liveness.signs(folder).values():
                if sign is not None and (sign.role, sign.state) == ("generator", "waiting"):
                    return True
        return False

    _next_step(run)
    trainer = _process(run, "rank1")
    trainer.send_signal(signal.SIGSTOP)
    try:
        _until(run, waits)
    finally:
        threading.Timer(1.0, _continue, (trainer,)).start()


def _starting(run: TinyRun, role: str) -> None:
    """Before the first step; the process has run for a while."""
    _process(run, role)
    time.sleep(3)


def _restarting(run: TinyRun, role: str) -> None:
    """While the trainer's ranks are started anew."""
    old = _process(run, "rank1")
    _next_step(run)
    kept = role.startswith(("generator", "core"))
    before = None if kept else _process(run, role)
    old.kill()
    _until(run, lambda: (p := run.roles().get("rank0")) and p.create_time() > old.create_time())
    if before is not None:
        _until(run, lambda: (p := run.roles().get(role)) and p.pid != before.pid)
    time.sleep(1)


def _joining(run: TinyRun, role: str) -> None:
    """While the engine is started anew."""
    name = role.replace("core-", "generator-")
    old = _process(run, name)
    _next_step(run)
    old.kill()
    _until(run, lambda: (p := run.roles().get(name)) and p.pid != old.pid)
    _until(run, lambda: role in run.roles())
    time.sleep(2)


def _ending(run: TinyRun, role: str) -> None:
    """After the last step, before the last evaluation is over."""
    _until(run, lambda: run.steps >= run.total)


MOMENTS: dict[str, Callable[[TinyRun, str], None]] = {
    "decoding": _decoding,
    "updating": _updating,
    "publishing": _publishing,
    "checkpoint": _checkpoint,
    "evaluation": _evaluation,
    "waiting": _waiting,
    "starting": _starting,
    "restarting": _restarting,
    "joining": _joining,
    "ending": _ending,
}
