"""A directory whose files are written once each, so that a killed conversion can be resumed.

Until it is complete, everything is in a hidden folder next to it, `.<target>.converting`:

    settings.json       source files and options; a restart with others is rejected
    lock                held by the running process
    model.safetensors.pickle    this file is on disk: its SHA-256 and result
    tree/               the files of the target; renamed to the target at the very end

`SHA256SUMS` in the target lists every other file in the format of `sha256sum`.
"""

import fcntl
import hashlib
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.files import naming_full_disk, replace_file
from megatron_rl.models import CheckpointError

SUMS = "SHA256SUMS"
WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|index\.json)")

Writers = dict[str, Callable[[Path], Any]]
"""Path in the target -> function that writes this large file to a path and returns a result."""
Finish = Callable[[Path, list[Any]], None]
"""Writes all other files, given the folder and the results of the large ones."""


class ConvertError(CheckpointError):
    """A checkpoint that cannot be converted; names the file or tensor, and the remedy."""


@dataclass(frozen=True, slots=True)
class Output:
    """A directory to make and the way to write it."""

    target: Path
    file_bytes: int
    workers: int = 1  # number of files written at once
    quiet: bool = False  # print nothing about progress

    def write(
        self, settings: dict[str, Any], sources: list[Path], files: Writers, finish: Finish
    ) -> Path:
        """Write the files that are not recorded yet, finish, and rename the result to the target.

        `settings` are the options of the conversion (JSON), `sources` the files that it reads.

        Raises:
            ConvertError: the target exists, another process is writing it, or a killed conversion
                to it had other settings or sources.
        """
        read = {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in sources}
        settings = {**settings, "source": read, "file_bytes": self.file_bytes}
        with naming_full_disk(self.target), _work_folder(self.target, settings) as folder:
            tree, written = folder / "tree", self._write_missing(folder, files)
            finish(tree, [result for _, result in written.values()])
            sums = {name: digest for name, (digest, _) in written.items()}
            sums |= {name: file_sum(tree / name) for name in _files_below(tree) - sums.keys()}
            replace_file(tree / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))
            tree.rename(self.target)
            shutil.rmtree(folder)
        return self.target

    def _write_missing(self, folder: Path, files: Writers) -> dict[str, tuple[str, Any]]:
        """Return SHA-256 and result of every file."""
        begin, tree = time.monotonic(), folder / "tree"
        records = {name: folder / f"{name.replace('/', '-')}.pickle" for name in files}

        def write(name: str) -> str:
            path = tree / name
            path.parent.mkdir(exist_ok=True)
            result = files[name](path)
            replace_file(records[name], pickle.dumps((file_sum(path), result)))
            return f"{name}: {path.stat().st_size / 1e6:.0f} MB"

        missing = [name for name, record in records.items() if not record.is_file()]
        if len(missing) < len(files) and not self.quiet:
            print(f"resuming: {len(files) - len(missing)} of {len(files)} files are complete")
        with ThreadPoolExecutor(self.workers) as pool:
            for count, line in enumerate(pool.map(write, missing), start=1):
                if not self.quiet:
                    seconds = time.monotonic() - begin
                    print(f"{line} ({count} of {len(missing)} in {seconds:.0f} s)", flush=True)
        return {name: pickle.loads(record.read_bytes()) for name, record in records.items()}


@contextmanager
def _work_folder(target: Path, settings: dict[str, Any]) -> Iterator[Path]:
    """Make and lock the work folder of a target, or take over that of a killed conversion."""
    if target.exists():
        raise ConvertError(f"{target} exists: remove it, or name another target")
    folder = target.parent / f".{target.name}.converting"
    (folder / "tree").mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"{target} is being converted by another process: wait for it, or end it"
            raise ConvertError(text) from None
        path = folder / "settings.json"
        if not path.is_file():
            replace_file(path, json.dumps(settings, indent=1))
        before = json.loads(path.read_text())
        if differ := [key for key in settings if before.get(key) != settings[key]]:
            raise ConvertError(
                f"{folder} holds an unfinished conversion with another {', '.join(differ)}: start"
                " it with the same settings to resume it, or remove the folder"
            )
        yield folder


def verify(directory: Path) -> int:
    """Compare a converted directory with its `SHA256SUMS`; return the number of files.

    Raises:
        ConvertError: no such list, or files that are missing, broken or not listed.
    """
    sums = directory / SUMS
    if not sums.is_file():
        raise ConvertError(f"{sums}: missing: the directory was not made by a conversion")
    lines = [line.partition("  ") for line in sums.read_text().splitlines()]
    listed = {name: digest for digest, _, name in lines}
    present = _files_below(directory) - {SUMS}
    missing, extra = sorted(listed.keys() - present), sorted(present - listed.keys())
    broken = [n for n in sorted(listed.keys() & present) if file_sum(directory / n) != listed[n]]
    if missing or extra or broken:
        raise ConvertError(
            f"{directory} differs from its {SUMS}: broken {broken}, missing {missing}, not listed"
            f" {extra}; convert it again"
        )
    return len(listed)


def copy_other_files(source: Path, target: Path) -> None:
    """Copy the files that hold no weights: config.json, tokenizer, license, code."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        skipped = path.name.startswith(".") or path.name == SUMS or WEIGHTS.fullmatch(path.name)
        if path.is_file() and not skipped:
            shutil.copyfile(path, target / path.name)
            os.chmod(target / path.name, 0o644)


def file_sum(path: Path) -> str:
    """Flush a file to disk and return its SHA-256 in hex."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files_below(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
