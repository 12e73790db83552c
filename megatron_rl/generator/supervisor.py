"""A generator rank of torchrun: it keeps one engine's process running, and is not that process.

The process (`megatron-rl generate`) has a session of its own, so torchrun's signals do not reach
it: it outlives a restart of the ranks, and the next supervisor takes it over. In the node's folder
(`liveness.node_folder`):

    <run>engine_<index>.lock       locked by the process while it lives; a `Record`
    <run>engine_<index>.endpoint   the address of the orchestrator, which the process watches
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import psutil

from megatron_rl import liveness
from megatron_rl.config import RunConfig
from megatron_rl.files import replace_file, report_failure

WITHIN_SECONDS = 600.0  # in which `fleet.generator_restarts` are counted
POLL_SECONDS = 0.1
_PAUSE_SECONDS = 5.0
_RECORD_SECONDS = 60.0  # for the first act of a process that was just started
_KILLED_SECONDS = 2.0  # for the end of a session that was killed
_BYTES = 16_384


class EngineStartError(RuntimeError):
    """An engine of a run that has just begun did not start; another try would end as this one."""


class Record(msgspec.Struct, kw_only=True):
    """An engine's process, as it says itself."""

    pid: int
    born: int  # `liveness.born`
    agent: int  # the process of torchrun with which it ends
    ready: bool = False  # True once its engine has run
    status: int | None = None  # None while it runs, and if it was killed
    error: str = ""  # the error that ended it, with its cause


class EngineRecord:
    """The record of this process in a file that it has inherited; -1: there is none."""

    def __init__(self, descriptor: int, agent: int) -> None:
        self._file = descriptor
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
        self._record = Record(pid=os.getpid(), born=liveness.born(os.getpid()), agent=agent)

    def touch(self) -> None:
        """Show that the process works; it is to do so every few seconds once it is ready."""
        if self._file >= 0:
            os.utime(self._file)

    def write(self, **changes: Any) -> None:
        """Change fields of the record."""
        self._record = msgspec.structs.replace(self._record, **changes)
        if self._file >= 0:
            self._record.error = self._record.error[: _BYTES // 8]  # a letter takes 6 bytes at most
            os.pwrite(self._file, msgspec.json.encode(self._record).ljust(_BYTES), 0)


def engine_name(index: int | str) -> str:
    """Return the name of a generator; those with a number are kept running by ranks of torchrun."""
    return f"generator-{index}"


def supervise(
    config: RunConfig, rank: int, store: Any, python: str, environment: Mapping[str, str]
) -> None:
    """Keep the engine of a generator rank running until it ends well.

    The first rank of an engine does; the others lend it their device. `store` is torchrun's,
    `python` the interpreter of the generators, with these environment variables.

    Raises:
        EngineStartError: the first engine of the run did not start.
        RuntimeError: the engine ended too often.
        TimeoutError: the trainer did not start within `timeouts.startup_seconds`.
        SystemExit: torchrun ends or restarts the ranks.
    """
    engine, member = divmod(
        rank - config.roles.trainer_ranks, config.roles.generator_tensor_parallel
    )
    finished = f"engine-{engine}-finished"
    if member:
        from torch.distributed import DistStoreError

        while not store.check([finished]):
            with contextlib.suppress(DistStoreError):
                store.wait([finished], timedelta(seconds=60))
        return
    try:
        Supervisor(config, engine, python, environment).run(store)
    except Exception as e:
        report_failure(f"{type(e).__name__}: {e}")
        raise
    finally:
        with contextlib.suppress(RuntimeError):  # the store may have ended with the run
            store.set(finished, "1")


class Supervisor:
    """Keeps the process of one engine running; see `supervise` for the arguments."""

    def __init__(
        self, config: RunConfig, engine: int, python: str, environment: Mapping[str, str]
    ) -> None:
        self._config, self._name, self._agent = config, engine_name(engine), os.getppid()
        folder = liveness.node_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        prefix = f"{liveness.run_prefix(config.output_dir.resolve())}engine_{engine}"
        self._path, self._endpoint = folder / f"{prefix}.lock", folder / f"{prefix}.endpoint"
        self._command = [python, "-m", "megatron_rl.cli", "generate", "--join"]
        self._command += [str(self._endpoint), "--name", self._name, "--agent", str(self._agent)]
        self._environment = {k: v for k, v in environment.items() if k != "TORCHELASTIC_ERROR_FILE"}
        self._restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._last_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._signal = self._open_lock(), 0
        self._touched, self._alive_at, self._looked_at = 0, 0.0, 0.0

    def run(self, store: Any) -> None:
        """Start the engine, or take over the one that runs, and stay until it ends well."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)
        self._write_endpoint(store)
        if self._may_start():
            lost = self._record()
            if lost is not None and lost.agent == self._agent:  # while the ranks were started again
                _say(f"{self._what(lost.status, lost)}; it is started again")
            self._start()
        was_ready, ends = False, list[float]()
        while True:
            time.sleep(POLL_SECONDS)
            self._obey()
            if not self._has_lock():
                self._end_rest()
                self._end_hanging()
                continue
            status, record = self._end()
            was_ready |= record is not None and record.ready
            if status == 0:
                return
            what = self._what(status, record)
            if status is not None and status > 0 and not was_ready and self._restart == 0:
                raise EngineStartError(f"{what}; no engine of this run has started yet")
            now, limit = time.monotonic(), self._config.fleet.generator_restarts
            ends = [end for end in ends if now - end < WITHIN_SECONDS] + [now]
            if len(ends) > limit:
                raise RuntimeError(
                    f"{what}; it was started again {limit} times within {WITHIN_SECONDS:g} s"
                    " (fleet.generator_restarts)"
                )
            _say(f"{what}; it is started again ({len(ends)} of {limit})")
            self._start()

    def _what(self, status: int | None, record: Record | None) -> str:
        """Return how the engine's process ended, and why as far as it is known."""
        how = "was killed" if status is None else f"ended with exit status {status}"
        if status is not None and status < 0:
            how = f"was killed by signal {-status} ({signal.Signals(-status).name})"
        cause = f": {record.error}" if record is not None and record.error else ""
        return f"{self._name} {how}{cause or '; its log has the cause'}"

    def _remember(self, number: int, _: object) -> None:
        self._signal = number

    def _write_endpoint(self, store: Any) -> None:
        """Wait for the orchestrator's address, and have the engine's process see it."""
        limit = self._config.timeouts.startup_seconds
        deadline = time.monotonic() + limit
        while not store.check(["orchestrator"]):
            self._obey()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"trainer rank 0 has started no orchestrator within timeouts.startup_seconds ="
                    f" {limit:g}; its log has the cause"
                )
            time.sleep(POLL_SECONDS)
        content = json.dumps({"endpoint": store.get("orchestrator").decode()})
        replace_file(self._endpoint, content, durable=False)

    def _start(self) -> None:
        """Start the process, which inherits the lock."""
        os.ftruncate(self._lock, 0)
        self._process = subprocess.Popen(
            [*self._command, "--record", str(self._lock)],
            env=self._environment,
            start_new_session=True,
            pass_fds=[self._lock],
        )
        os.close(self._lock)  # that of the process keeps the lock
        self._lock = self._open_lock()

    def _may_start(self) -> bool:
        """Return False if a process of an earlier incarnation goes on."""
        deadline = time.monotonic() + _RECORD_SECONDS
        while not self._has_lock():
            record = self._record()
            if record is not None and record.agent == self._agent:
                _say(f"{self._name} (process {record.pid}) has outlived the ranks and goes on")
                return False
            if record is not None or time.monotonic() > deadline:  # of another torchrun
                self.end_engine()
            time.sleep(POLL_SECONDS)
            self._obey()
        return True

    def _open_lock(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)

    def _has_lock(self) -> bool:
        """Return True, and have the lock, if there is no process of the engine."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _end(self) -> tuple[int | None, Record | None]:
        """Return exit status, None if it is not known, and record of the process that has ended."""
        record = self._record()
        if self._process is not None:
            return self._process.wait(self._config.timeouts.shutdown_seconds), record
        return (None if record is None else record.status), record

    def _record(self) -> Record | None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self._path.read_bytes(), type=Record)
        return None

    def _obey(self) -> None:
        """End by a signal, or with torchrun; the engine lives on if the ranks are started again."""
        is_orphan = os.getppid() != self._agent
        if not (self._signal or is_orphan):
            return
        if is_orphan or self._restart >= self._last_restart:
            self.end_engine()
        sys.exit(128 + (self._signal or signal.SIGTERM))

    def end_engine(self) -> None:
        """Ask the engine's process to leave, and kill its session if it does not end."""
        deadline = time.monotonic() + self._config.timeouts.shutdown_seconds
        was_asked = False
        while not self._has_lock():
            record = self._record()
            if record is not None and liveness.born(record.pid) == record.born:
                if time.monotonic() > deadline:
                    _kill_session(record.pid)
                elif not was_asked:
                    was_asked = True
                    os.kill(record.pid, signal.SIGTERM)
            if time.monotonic() > deadline + _KILLED_SECONDS:
                return
            time.sleep(POLL_SECONDS)
            self._end_rest()

    def _end_hanging(self) -> None:
        """Kill the engine's process if it was ready and shows no life, as one that is stopped."""
        now, touched = time.monotonic(), self._path.stat().st_mtime_ns
        was_paused = now - self._looked_at > _PAUSE_SECONDS  # this process was stopped, too
        self._looked_at = now
        if touched != self._touched or was_paused:
            self._touched, self._alive_at = touched, now
        silent = now - self._alive_at
        if silent < self._config.timeouts.hang_seconds:
            return
        record = self._record()
        if record is not None and record.ready and liveness.born(record.pid) == record.born:
            _say(
                f"{self._name} (process {record.pid}) shows no life for {silent:.0f} s (4 x"
                " timeouts.silence_seconds): it hangs or is stopped, and is killed"
            )
            _kill_session(record.pid)
            self._alive_at = now

    def _end_rest(self) -> None:
        """End what an engine's process that is gone has left in its session."""
        record = self._record()
        # A process of that number now is another one: then nothing is left of the session.
        if record is not None and liveness.born(record.pid) < 0:
            _kill_session(record.pid)


def _say(text: str) -> None:
    print(f"megatron_rl: {text}", file=sys.stderr, flush=True)


def _kill_session(leader: int) -> None:
    """Kill a process that leads a session, and all others of it."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == leader:
                process.kill()
