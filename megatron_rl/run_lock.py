"""One run, one folder: files by which the processes of a run know of each other.

run.lock            locked by trainer rank 0 from its first act to its end
orchestrator.json   the address that generators join
final_error.json    an error that torchrun's next ranks would only meet again
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO, Any

from megatron_rl.files import naming_full_disk, replace_file, report_failure

FILE = "run.lock"
ENDPOINT_FILE = "orchestrator.json"
FINAL_ERROR_FILE = "final_error.json"


class FolderInUse(RuntimeError):
    """Another live run has the folder."""


def hold(folder: Path) -> IO[str]:
    """Lock a run's folder for as long as the returned file is open.

    The lock goes with the process, however it ends; ranks that outlive torchrun keep it. It holds
    between nodes where the file system has locks; where it has none, a warning says so.

    Raises:
        FolderInUse: names the host, the process and the start of the run that has it, or had it
            when an earlier incarnation of this torchrun was refused.
    """
    if (refusal := _refusal()) is not None and refusal.exists():
        raise FolderInUse(refusal.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    with naming_full_disk(path):
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
        text = (
            f"{folder}: {holder} writes to this folder: stop that run first, or give this one"
            " another output_dir"
        )
        if refusal is not None:
            refusal.write_text(text)
        raise FolderInUse(text) from None
    own = {"host": socket.gethostname(), "pid": os.getpid(), "unix": time.time()}
    with naming_full_disk(path):
        file.truncate(0)
        file.write(json.dumps(own))
        file.flush()
    return file


def _refusal() -> Path | None:
    """Return the file by which restarted ranks know of a refusal; it is among torchrun's own."""
    # <torchrun's logs of this start>/attempt_<n>/<local rank>/error.json
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return attempt.with_name("folder_in_use") if attempt.name.startswith("attempt_") else None


def _holder(file: IO[str]) -> str:
    """Describe the run that has a lock."""
    file.seek(0)
    try:
        held = json.loads(file.read())
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(held["unix"]))
        return f"process {held['pid']} on host {held['host']}, started {started},"
    except (ValueError, KeyError):  # it is just starting
        return "another run"


def record_final_error(folder: Path, error: str) -> None:
    """Have the ranks that torchrun starts again end at once, by this error."""
    if run := os.environ.get("TORCHELASTIC_RUN_ID"):
        content = json.dumps({"torchrun": run, "error": error})
        replace_file(folder / FINAL_ERROR_FILE, content, durable=False)


def final_error(folder: Path) -> str | None:
    """Return the error that ended an earlier incarnation of this torchrun for good, if one did.

    The first incarnation removes that of another torchrun, which may have the same id.
    """
    path = folder / FINAL_ERROR_FILE
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        if os.environ.get("RANK") == "0":
            path.unlink(missing_ok=True)
        return None
    content = _content(path)
    same = content.get("torchrun") == os.environ["TORCHELASTIC_RUN_ID"]
    return content.get("error") if same else None


def last_error(folder: Path) -> str | None:
    """Return the error that ended the last start of a run for good, if one did."""
    return _content(folder / FINAL_ERROR_FILE).get("error")


def last_start(folder: Path) -> float | None:
    """Return the time of the last start of a run's ranks [seconds since 1970], if it is known."""
    unix = _content(folder / FILE).get("unix")
    return unix if isinstance(unix, float) else None


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def end_after_final_error(folder: Path) -> None:
    """End this rank if there is a `final_error`, which torchrun's last lines repeat."""
    if (error := final_error(folder)) is None:
        return
    text = f"not started again after {error}"
    report_failure(text)
    if os.environ.get("RANK") == "0":
        print(f"megatron-rl: {text}", file=sys.stderr)
    sys.exit(2)
