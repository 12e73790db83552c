"""Atomic replacement of files and folders: readers see the old one or the new one, complete."""

import json
import os
import shutil
import time
from pathlib import Path


def replace_file(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write a file under a temporary name in its folder, and on the disk, then rename it."""
    work = path.with_name(f".{path.name}.tmp{os.getpid()}")
    with work.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    work.replace(path)


def replace_folder(work: Path, final: Path) -> None:
    """Rename a complete folder into place; an older one of that name is removed."""
    old = final.with_name(f".{final.name}.old{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    work.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def report_failure(error: str) -> None:
    """Have torchrun's summary show the error for this rank, or for that which started the process.

    The format is that of `torch.distributed.elastic.multiprocessing.errors`.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        failure = {"message": error, "extraInfo": {"timestamp": str(int(time.time()))}}
        replace_file(Path(path), json.dumps({"message": failure}))
