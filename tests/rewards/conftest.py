"""Helpers of the tests of worker processes and sandboxes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SANDBOX_UIDS = range(1_900_000_000, 1_900_001_000)


def descendants() -> dict[int, str]:
    """Return process id -> command line of this process's descendants and of orphaned sandboxes.

    An orphan is no longer a descendant; its user id or its command identifies it. A sandbox below
    another Python is that of another test worker.
    """
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    sandboxes: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            status = Path(f"/proc/{entry}/status").read_text()
            command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        parents[int(entry)] = int(fields["PPid"])
        text = commands[int(entry)] = command.decode(errors="replace")
        if int(fields["Uid"].split()[0]) in SANDBOX_UIDS or "bwrap --unshare" in text:
            sandboxes.add(int(entry))
    out: dict[int, str] = {}
    for pid in parents:
        above, of_another = pid, False
        while above in parents and above != os.getpid():
            above = parents[above]
            outside = above not in sandboxes and above != os.getpid()
            of_another |= outside and "python" in commands.get(above, "")
        ours = above == os.getpid() and pid != os.getpid()
        if ours or (pid in sandboxes and not of_another):
            out[pid] = commands[pid] or "descendant"
    return out


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def started_since(before: dict[int, str], seconds: float) -> dict[int, str]:
    """Return the processes started since that still run after waiting so many seconds."""
    end = time.monotonic() + seconds
    while True:
        left = {pid: text for pid, text in descendants().items() if pid not in before}
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Check that no process started by the test is left."""
    before = descendants()
    yield
    assert started_since(before, 5.0) == {}
