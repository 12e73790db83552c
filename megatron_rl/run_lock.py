"""One run, one folder: a lock that a run holds from its first act to its end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO

FILE = "run.lock"


class FolderInUse(RuntimeError):
    """Another live run has the folder."""


def hold(folder: Path) -> IO[str]:
    """Lock a run's folder for as long as the returned file is open.

    The lock goes with the process, however it ends, so a killed run leaves none behind; ranks that
    outlive torchrun keep it. It holds between nodes where the file system has locks; where it has
    none, a warning says so.

    Raises:
        FolderInUse: names the host, the process and the start of the run that has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            print(
                f"warning: {path}: the file system has no locks ({e.strerror}), so a second start"
                " in this folder is not noticed",
                file=sys.stderr,
            )
            return file
        if e.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        holder = _holder(file)
        file.close()
        raise FolderInUse(
            f"{folder}: {holder} writes to this folder: stop that run first, or give this one"
            " another output_dir"
        ) from None
    file.truncate(0)
    file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "unix": time.time()}))
    file.flush()
    return file


def _holder(file: IO[str]) -> str:
    """Describe the run that has a lock."""
    file.seek(0)
    try:
        held = json.loads(file.read())
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(held["unix"]))
        return f"process {held['pid']} on host {held['host']}, started {started},"
    except (ValueError, KeyError):  # it is just starting
        return "another run"
