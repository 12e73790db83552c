"""A conversion as parts that are done once each: work folder, resuming, checksums.

While it runs, all files are in a hidden folder beside the target:

    .<target>.converting/
        job.json            {"format": 1, ...}: source files and options that it was started with
        lock                held by the running conversion
        parts/00003.pickle  part 3 is complete: what it wrote, with checksums
        tree/               the files of the target

A part is recorded after its files are on disk, so a conversion that was killed at any moment goes
on with the parts that have no record. `job.json` must be the same then: a source that changed, or
other options, are refused. When all parts are done, `tree` takes the target's name.

`SHA256SUMS` in the target has the checksum of every other file in the format of `sha256sum`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.commands.convert.errors import ConvertError

FORMAT = 1
SUMS = "SHA256SUMS"


@dataclass(frozen=True, slots=True)
class Work:
    """The folders of a running conversion."""

    target: Path

    @property
    def folder(self) -> Path:
        """Everything until it is complete."""
        return self.target.parent / f".{self.target.name}.converting"

    @property
    def tree(self) -> Path:
        """What will be the target."""
        return self.folder / "tree"

    def record(self, part: int) -> Path:
        """Its existence says that a part is complete."""
        return self.folder / "parts" / f"{part:05d}.pickle"


@dataclass(frozen=True, slots=True)
class Done:
    """What a part wrote."""

    sums: dict[str, str]
    """SHA-256 by path below the tree."""
    content: Any = None
    """What the last step needs of it."""


@contextmanager
def started(target: Path, about: dict[str, Any]) -> Iterator[Work]:
    """The work folder of a conversion, made or taken over from one that was killed.

    Args:
        target: must not exist yet.
        about: identifies the conversion; JSON.

    Raises:
        ConvertError: the target exists, another conversion is writing it, or the one that was
            killed had another source or other options.
    """
    work = Work(target)
    if target.exists():
        raise ConvertError(f"{target} exists: remove it, or name another target")
    work.record(0).parent.mkdir(parents=True, exist_ok=True)
    work.tree.mkdir(exist_ok=True)
    with (work.folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConvertError(
                f"{target} is being converted by another process: wait for it, or end it"
            ) from None
        _check_same(work, {"format": FORMAT, **about})
        yield work


def _check_same(work: Work, about: dict[str, Any]) -> None:
    path = work.folder / "job.json"
    if not path.is_file():
        _write_atomically(path, json.dumps(about, indent=1).encode())
        return
    before = json.loads(path.read_text())
    differ = [key for key in about if before.get(key) != about[key]]
    if differ:
        raise ConvertError(
            f"{work.folder} holds a conversion that did not end and that had another"
            f" {', '.join(differ)}: start it as before to go on, or remove the folder"
        )


def run_parts(
    work: Work,
    parts: int,
    convert: Callable[[int], Done],
    workers: int,
    say: Callable[[str], None],
) -> list[Done]:
    """Does the parts that have no record yet.

    Args:
        work: of `started`.
        parts: how many there are.
        convert: does one part; a function of a module (it may run in another process).
        workers: processes; 1 does everything in this one.
        say: is told about progress.

    Returns:
        What each part wrote, from its record where it was done before.
    """
    left = [i for i in range(parts) if not work.record(i).is_file()]
    if len(left) < parts:
        say(f"going on: {parts - len(left)} of {parts} parts are done")
    begin = time.monotonic()

    def finish(part: int, done: Done, count: int) -> None:
        _write_atomically(work.record(part), pickle.dumps(done))
        size = sum((work.tree / name).stat().st_size for name in done.sums)
        say(
            f"part {part + 1} of {parts}: {size / 1e6:.0f} MB"
            f" ({count} of {len(left)} in {time.monotonic() - begin:.0f} s)"
        )

    if workers == 1:
        for count, part in enumerate(left, start=1):
            finish(part, convert(part), count)
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            pending = {pool.submit(convert, part): part for part in left}
            try:
                for count, future in enumerate(as_completed(pending), start=1):
                    finish(pending[future], future.result(), count)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return [pickle.loads(work.record(i).read_bytes()) for i in range(parts)]


def complete(work: Work, parts: list[Done]) -> Path:
    """Writes `SHA256SUMS` and gives the tree the target's name."""
    sums: dict[str, str] = {}
    for part in parts:
        sums |= part.sums
    for path in sorted(work.tree.rglob("*")):
        name = path.relative_to(work.tree).as_posix()
        if path.is_file() and name not in sums and name != SUMS:
            sums[name] = file_sum(path)
    lines = [f"{sums[name]}  {name}\n" for name in sorted(sums)]
    _write_atomically(work.tree / SUMS, "".join(lines).encode())
    work.tree.rename(work.target)
    shutil.rmtree(work.folder)
    return work.target


def file_sum(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(directory: Path) -> int:
    """Compares a converted directory with its `SHA256SUMS`.

    Returns:
        Files that were compared.

    Raises:
        ConvertError: no such file, or files that are missing, broken or not listed.
    """
    sums = directory / SUMS
    if not sums.is_file():
        raise ConvertError(f"{sums}: missing: the directory was not made by a conversion")
    lines = [line.partition("  ") for line in sums.read_text().splitlines()]
    wanted = {name: digest for digest, _, name in lines}
    found = {
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path != sums
    }
    missing, extra = sorted(wanted.keys() - found), sorted(found - wanted.keys())
    broken = [n for n in sorted(wanted.keys() & found) if file_sum(directory / n) != wanted[n]]
    if missing or extra or broken:
        raise ConvertError(
            f"{directory} is not as it was converted: broken {broken}, missing {missing}, not"
            f" listed {extra}; convert it again"
        )
    return len(wanted)


def fingerprint(files: list[Path]) -> dict[str, list[int]]:
    """Size and time of change of the files that a conversion reads."""
    return {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in files}


def _write_atomically(path: Path, data: bytes) -> None:
    work = path.with_name(path.name + ".tmp")
    with work.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    work.replace(path)
