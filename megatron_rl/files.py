"""Atomic replacement of files and folders, checksums of files, and errors of a full disk.

Readers of a file or folder that is replaced see the old one or the new one, complete.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import xxhash


def sibling(path: Path, kind: str) -> Path:
    """Return a hidden name in the same folder that no process has, on any node or in a container.

    Example: `.config.yaml.tmp-5d41402a`. `left_in` finds those that were left.
    """
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def left_in(folder: Path) -> list[Path]:
    """Return the half-written files and folders there: torn if no process writes to the folder."""
    names = (f".*.{kind}-{'[0-9a-z_]' * 8}" for kind in ("tmp", "old"))
    return [path for name in names for path in folder.glob(name)]


def replace_file(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write a file under a temporary name in its folder, and on the disk, then rename it."""
    work = sibling(path, "tmp")
    try:
        with naming_full_disk(path), work.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        work.replace(path)
    except BaseException:
        work.unlink(missing_ok=True)
        raise


class DiskFull(OSError):
    """The error of a full disk, with the file that it is about and the remedy."""


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Raise `DiskFull` for an error of a full disk, unless it was named inside.

    It may be an `OSError`, or the error of safetensors, which has only a text.
    """
    try:
        yield
    except DiskFull:
        raise
    except Exception as e:
        text = re.search(r"\(os error (\d+)\)", str(e))
        number = e.errno if isinstance(e, OSError) else int(text[1]) if text else None
        if number not in (errno.ENOSPC, errno.EDQUOT):
            raise
        problem = f"{os.strerror(number)}: {path}: free some space there, and start it again"
        raise DiskFull(number, f"{problem} (a run with --resume)") from e


def size_and_sum(path: Path) -> tuple[int, str]:
    """Return the size and the xxh3-128 of a file: it detects damage, not an adversary."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        return file.tell(), digest


def damage(folder: Path, sums: Mapping[str, Sequence[int | str]]) -> list[str]:
    """Return what is wrong with files of a folder, a line for each.

    `sums` has the `size_and_sum` that each was written with, by name.
    """
    problems = []
    for name, (size, digest) in sums.items():
        path = folder / name
        try:
            now = size_and_sum(path)
            if now[0] != size:
                problems.append(f"{path}: it has {now[0]:,} of {size:,} bytes")
            elif now[1] != digest:
                problems.append(f"{path}: its bytes were changed after it was written (checksum)")
        except OSError as e:
            problems.append(f"{path}: {e.strerror}")
    return problems


def replace_folder(work: Path, final: Path) -> None:
    """Rename a complete folder into place; an older one of that name is removed."""
    old = sibling(final, "old")
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
