"""Run a program against test inputs in a sandbox, and kill all of it at the end."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.rewards.base import SandboxUnavailable
from megatron_rl.rewards.code import isolation
from megatron_rl.rewards.verifier_settings import SandboxSettings

POLL_SECONDS = 0.05
EXIT_SECONDS = 1.0  # wait for the processes of a killed sandbox to end


@dataclass(frozen=True, slots=True)
class ProgramResult:
    r"""Result of a program in one test. Example: `ProgramResult("ok", "3\n", "", "", 0.02)`."""

    status: str
    """`ok`, `error` (an exception), `time`, `cpu`, `memory`, `output`, `file`, `signal N`,
    `killed` (the sandbox ended before the test did), `total` (no time was left)."""
    stdout: str
    value: str  # JSON of a function's result
    error: str  # end of standard error
    seconds: float


def run_tests(
    source: str, tests: list[dict[str, Any]], settings: SandboxSettings
) -> Generator[ProgramResult, None, None]:
    """Yield the results of the tests in order; closing the generator kills the sandbox.

    A test is `{"stdin": text}`, `{"call": name, "args": list}` or `{"script": text}`.
    Raises `SandboxUnavailable` if the sandbox itself did not start.
    """
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
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    options: dict[str, Any] = {"env": isolation.ENVIRONMENT, "pass_fds": launch.fds, **pipes}
    process = subprocess.Popen(launch.command, start_new_session=True, **options)
    launch.close()
    assert process.stdin is not None
    try:
        # The harness reads the whole job before it writes anything.
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(job).encode())
        yield from _results(process, len(tests), settings)
    finally:
        _kill(process, settings.isolation == "strong")


def _results(
    process: subprocess.Popen[bytes], count: int, settings: SandboxSettings
) -> Generator[ProgramResult, None, None]:
    assert process.stdout is not None and process.stderr is not None
    deadline = time.monotonic() + settings.total_seconds
    poller = select.poll()
    poller.register(process.stdout)
    done, status, buffer = 0, "", bytearray()
    while not status:
        ready = poller.poll(POLL_SECONDS * 1000)
        data = os.read(process.stdout.fileno(), 1 << 20) if ready else b""
        buffer += data
        if b"\n" in data:
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                result = _parse(line)
                if result.status == "sandbox":
                    raise SandboxUnavailable(f"the sandbox set no limits: {result.error}")
                yield result
                done += 1
                if done == count:
                    return
        if ready and not data:
            status = "killed"
        elif time.monotonic() > deadline:
            status = "total"
        elif settings.isolation == "strong" and _memory(process.pid) > settings.memory_mib * 2**20:
            status = "memory"
    os.set_blocking(process.stderr.fileno(), False)
    error = (process.stderr.read() or b"").decode(errors="replace")
    if status == "killed" and done == 0 and "bwrap:" in error:
        raise SandboxUnavailable(f"the sandbox did not start: {error[-500:]}")
    yield ProgramResult(status, "", "", error[-500:], 0.0)


def _parse(line: bytearray) -> ProgramResult:
    """Parse a line of the harness; any other line was written by the program, which fails."""
    try:
        return ProgramResult(**json.loads(line))
    except (ValueError, TypeError):
        return ProgramResult("error", "", "", "the program wrote into the harness's channel", 0.0)


def _memory(pid: int) -> int:
    """Return the private resident bytes of a process and all its descendants."""
    total, page = 0, os.sysconf("SC_PAGE_SIZE")
    queue = [pid]
    while queue:
        current = queue.pop()
        try:
            resident, shared = Path(f"/proc/{current}/statm").read_text().split()[1:3]
            total += (int(resident) - int(shared)) * page
            queue.extend(_children(current))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return total


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _kill(process: subprocess.Popen[bytes], strong: bool) -> None:
    """Kill the sandbox; its process namespace dies with its first process."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        children = _children(process.pid)
    with contextlib.suppress(ProcessLookupError):
        if not strong:
            os.killpg(process.pid, signal.SIGKILL)
        for child in children:
            os.kill(child, signal.SIGKILL)
    # Bubblewrap reaps the first process and ends; killed, it would leave that to the host.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=EXIT_SECONDS if children else 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    # Every process inside had the pipes open: end of file means that all of them ended.
    process.stdin = None  # closed; `communicate` would flush it
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=EXIT_SECONDS)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
