"""Run a program against test inputs in a sandbox, and kill all of it at the end."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.rewards.base import SandboxUnavailable
from megatron_rl.rewards.code import isolation
from megatron_rl.rewards.verifier_settings import SandboxSettings

POLL_SECONDS = 0.05
GONE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What a program did in one test. Example: `ProgramResult("ok", "3\\n", "", "", 0.02)`."""

    status: str
    """`ok`, `error` (an exception), `time`, `cpu`, `memory`, `output`, `file`, `signal N`,
    `killed` (the sandbox ended before the test did), `total` (no time was left)."""
    stdout: str
    value: str
    """JSON of a function's result."""
    error: str
    """End of standard error."""
    seconds: float


def run_tests(
    source: str, tests: list[dict[str, Any]], settings: SandboxSettings
) -> Iterator[ProgramResult]:
    """Results of the tests, in order, one at a time; closing the iterator kills the sandbox.

    Args:
        source: Python program.
        tests: `{"stdin": text}`, `{"call": name, "args": list}` or `{"asserts": expressions}`.
        settings: isolation and limits.

    Raises:
        SandboxUnavailable: the sandbox itself did not start.
    """
    if settings.isolation == "remote":
        from megatron_rl.rewards.code.remote import run_remotely

        yield from run_remotely(source, tests, settings)
        return
    launch = (isolation.strong if settings.isolation == "strong" else isolation.weak)(settings)
    job = {
        **launch.job,
        "source": source,
        "tests": tests,
        "cpu_seconds": settings.cpu_seconds,
        "wall_seconds": settings.wall_seconds,
        "memory_bytes": settings.memory_mib * 2**20,
        "file_bytes": settings.file_mib * 2**20,
        "output_bytes": settings.output_kib * 2**10,
    }
    process = subprocess.Popen(
        launch.command,
        env=launch.environment,
        pass_fds=launch.fds,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    launch.close()
    try:
        yield from _results(process, json.dumps(job).encode(), len(tests), settings)
    finally:
        _kill(process)


def _results(
    process: subprocess.Popen[bytes], job: bytes, count: int, settings: SandboxSettings
) -> Iterator[ProgramResult]:
    deadline = time.monotonic() + settings.total_seconds
    done, over, watched = 0, "", settings.isolation == "strong"
    with _Pipes(process, job) as pipes:
        while done < count:
            for line in pipes.lines():
                result = _result(line)
                if result.status == "sandbox":
                    raise SandboxUnavailable(f"the sandbox set no limits: {result.error}")
                yield result
                done += 1
                if done == count:
                    return
            if pipes.closed:
                break
            if time.monotonic() > deadline:
                over = "total"
                break
            if watched and _memory(process.pid) > settings.memory_mib * 2**20:
                over = "memory"
                break
        errors = pipes.errors
    text = errors.decode(errors="replace")[-500:]
    if not over and done == 0 and b"bwrap:" in errors:
        raise SandboxUnavailable(f"the sandbox did not start: {text}")
    yield ProgramResult(over or "killed", "", "", text, 0.0)


def _result(line: bytes) -> ProgramResult:
    """A line of the harness; what is none was written by the program, and fails."""
    try:
        fields = json.loads(line)
        return ProgramResult(
            *(fields[k] for k in ("status", "stdout", "value", "error", "seconds"))
        )
    except (ValueError, KeyError, TypeError):
        return ProgramResult("error", "", "", "the program wrote into the harness's channel", 0.0)


class _Pipes:
    """Writes the job and reads lines without blocking longer than a poll."""

    def __init__(self, process: subprocess.Popen[bytes], job: bytes) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._job, self._buffer = memoryview(job), bytearray()
        self.errors, self.closed = b"", False
        self._selector = selectors.DefaultSelector()
        for pipe, event in (
            (self._stdin, selectors.EVENT_WRITE),
            (self._stdout, selectors.EVENT_READ),
            (self._stderr, selectors.EVENT_READ),
        ):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, event)

    def __enter__(self) -> _Pipes:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def lines(self) -> list[bytes]:
        """Complete lines that came within a poll."""
        for key, _ in self._selector.select(POLL_SECONDS):
            if key.fileobj is self._stdin:
                self._write()
            elif key.fileobj is self._stderr:
                part = self._stderr.read(1 << 16)
                self.errors = (self.errors + (part or b""))[-4000:]
                if not part:
                    self._selector.unregister(self._stderr)
            else:
                part = self._stdout.read(1 << 20)
                if not part:
                    self.closed = True
                self._buffer += part or b""
        *lines, rest = bytes(self._buffer).split(b"\n") if b"\n" in self._buffer else [self._buffer]
        self._buffer = bytearray(rest)
        return [bytes(line) for line in lines]

    def _write(self) -> None:
        try:
            written = os.write(self._stdin.fileno(), self._job[: 1 << 16])
        except BrokenPipeError:
            written = len(self._job)
        self._job = self._job[written:]
        if not self._job:
            self._selector.unregister(self._stdin)
            self._stdin.close()


def _memory(pid: int) -> int:
    """Resident bytes of a process and all its descendants (shared pages count each time)."""
    total, page = 0, os.sysconf("SC_PAGE_SIZE")
    queue = [pid]
    while queue:
        current = queue.pop()
        try:
            resident, shared = Path(f"/proc/{current}/statm").read_text().split()[1:3]
            total += (int(resident) - int(shared)) * page
            for task in os.listdir(f"/proc/{current}/task"):
                children = Path(f"/proc/{current}/task/{task}/children").read_text()
                queue.extend(int(child) for child in children.split())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return total


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the sandbox; its process namespace dies with its first process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    # Everything inside held the write end of standard output: its end is the end of all of it.
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    end = time.monotonic() + GONE_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < end:
            if selector.select(POLL_SECONDS) and not process.stdout.read(1 << 20):
                break
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
