"""A store: the two newest versions of some buckets, in files that other processes map.

    <folder>/slot0, slot1               the buckets of a version, each at a multiple of 4096 bytes
    <folder>/difference0, difference1   of each bucket, what one version changed (`difference.py`)
    <folder>/header                     int64 words: what of all this is complete, and whose it is

A version goes into the slot that does not hold the newest one, bucket by bucket; the header says
which version a bucket holds once its bytes are there. Files in shared memory are on the node of
their readers; peers on other nodes read them through NIXL. All of it is allocated at the start:
`VERSIONS_HELD` times the bytes of a version.

A reader locks a slot before it compares checksums, until it has loaded: the writer waits for it.
"""

import fcntl
import itertools
import mmap
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_rl.weights.manifest import WeightsError, checksum

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "megatron_rl_"
"""Of the folders of stores in shared memory, or in `weights.directory`."""
PAGE = 4096
LARGEST_DIFFERENCE = 1 / 16
"""Of a bucket's bytes (3% of bf16 values); where more changes, the whole bucket travels."""
VERSIONS_HELD = 2 * (1 + LARGEST_DIFFERENCE)  # memory of a store, in versions
NONE = -1  # in the header: no version
_FIXED_WORDS = 2  # the heartbeat, and a number of the trainer's folder whose versions these are
_FIELDS = 8  # words per bucket: of each slot its version; of each difference target, base and size

Bytes = NDArray[np.uint8]


class Header:
    """The complete parts of a store of N buckets: int64 [1 + 8 N], its own or a peer's copy."""

    def __init__(self, words: NDArray[np.int64]) -> None:
        self.words = words
        fields = words[_FIXED_WORDS:].reshape(_FIELDS, -1)
        self.versions_2N = fields[0:2]  # of each bucket in each slot, or `NONE`
        self.targets_2N = fields[2:4]  # version that each difference makes, or `NONE`
        self.bases_2N = fields[4:6]  # version from which it makes it
        self.sizes_2N = fields[6:8]  # bytes of each difference

    @property
    def heartbeat(self) -> int:
        """A number that grows while the process that serves the store is alive."""
        return int(self.words[0])

    def slot_of(self, bucket: int, version: int) -> int | None:
        """Return the slot that holds this version of a bucket."""
        return next((slot for slot in (0, 1) if self.versions_2N[slot, bucket] == version), None)

    def chain(self, bucket: int, version: int, bases: Sequence[int]) -> list[int] | None:
        """Return the differences that lead from one of the bases to a version, in their order."""
        chain: list[int] = []
        wanted = version
        while wanted not in bases:
            nexts = [d for d in (0, 1) if self.targets_2N[d, bucket] == wanted and d not in chain]
            if not nexts:
                return None
            chain.insert(0, nexts[0])
            wanted = int(self.bases_2N[nexts[0], bucket])
        return chain


class Places:
    """The places of buckets of these sizes in the files of a store."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.offsets = _offsets(self.sizes)  # first byte of each bucket in a slot, and the end
        self.differences = _offsets([int(size * LARGEST_DIFFERENCE) for size in self.sizes])
        self.header_bytes = 8 * (_FIXED_WORDS + _FIELDS * len(self.sizes))


class Store:
    """Two slots and two differences of buckets of these sizes, mapped; `folder` is made if needed.

    With `replace`, new files take the place of those of other sizes, which are an error else.
    """

    def __init__(self, folder: Path, sizes: Sequence[int], *, replace: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.places = folder, Places(sizes)
        files = {
            "header": self.places.header_bytes,
            **{f"slot{i}": self.places.offsets[-1] for i in (0, 1)},
            **{f"difference{i}": self.places.differences[-1] for i in (0, 1)},
        }
        old = [path for name in files if (path := folder / name).exists()]
        if replace and any(path.stat().st_size != max(files[path.name], PAGE) for path in old):
            for path in old:
                path.unlink()
        words, created = self._map("header", files.pop("header"))
        self.header = Header(words.view(np.int64))
        if created:
            self.header.words[:] = NONE
            self.header.words[0] = 0
        mapped = [self._map(name, size)[0] for name, size in files.items()]
        self._slots, self._differences = mapped[:2], mapped[2:]

    def regions(self) -> list[Bytes]:
        """Return what a peer reads: header, slots, differences; `places` says where."""
        return [self.header.words.view(np.uint8), *self._slots, *self._differences]

    def bucket(self, slot: int, bucket: int) -> Bytes:
        """Return the bytes of a bucket in a slot."""
        start = self.places.offsets[bucket]
        return self._slots[slot][start : start + self.places.sizes[bucket]]

    def largest_difference(self, bucket: int) -> int:
        """Return the bytes of the largest difference of a bucket that is kept."""
        return int(self.places.sizes[bucket] * LARGEST_DIFFERENCE)

    def complete(self, version: int) -> int | None:
        """Return the slot in which every bucket has this version."""
        return next((s for s in (0, 1) if (self.header.versions_2N[s] == version).all()), None)

    def newest(self) -> int:
        """Return the newest complete version, or `NONE`."""
        whole = (int(v[0]) for v in self.header.versions_2N if v.size and (v == v[0]).all())
        return max(whole, default=NONE)

    def slot_for(self, version: int) -> int:
        """Return the slot for a new version: that of its begun buckets, or the older one."""
        newest = self.newest()
        begun = [s for s in (0, 1) if (self.header.versions_2N[s] == version).any()]
        return begun[0] if begun else next(s for s in (0, 1) if self.complete(newest) != s)

    def keep_only(self, root: str, seconds: float) -> None:
        """Forget all versions but those of the trainer's folder `root` (`Manifest.root`).

        A restarted trainer has another one, and may give the number of an old version again.
        Raises as `locked`.

        Raises:
            WeightsError: one is loaded for so long.
        """
        owner = int(checksum(root.encode())[:15], 16)
        if self.header.words[1] != owner:
            with (
                self.locked(0, write=True, seconds=seconds),
                self.locked(1, write=True, seconds=seconds),
            ):
                self.header.versions_2N[:] = self.header.targets_2N[:] = NONE
                self.header.words[1] = owner

    def put_difference(self, bucket: int, base: int, version: int, data: Bytes) -> None:
        """Keep a difference, in place of the older one."""
        number = version % 2
        self.header.targets_2N[number, bucket] = NONE
        if data.size <= self.largest_difference(bucket):
            start = self.places.differences[bucket]
            self._differences[number][start : start + data.size] = data
            self.header.bases_2N[number, bucket] = base
            self.header.sizes_2N[number, bucket] = data.size
            self.header.targets_2N[number, bucket] = version

    @contextmanager
    def locked(self, slot: int, *, write: bool, seconds: float) -> Iterator[None]:
        """Hold the lock of a slot, shared by readers; WeightsError: another has it for too long."""
        path = self.folder / f"slot{slot}"
        kind = fcntl.LOCK_EX if write else fcntl.LOCK_SH
        deadline = time.monotonic() + seconds
        with path.open("rb+") as file:
            while True:
                try:
                    fcntl.flock(file, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        who = "a generator still loads from it" if write else "it is being written"
                        raise WeightsError(
                            f"{path}: no lock within {seconds:g} s, {who}; end the process that"
                            " holds it (`fuser`), or raise timeouts.transfer_seconds"
                        ) from None
                    time.sleep(0.002)
            yield

    def _map(self, name: str, size: int) -> tuple[Bytes, bool]:
        """Map a file of the store, made of zeros if it is new; return (bytes, True if new)."""
        path, whole = self.folder / name, max(size, PAGE)
        with path.open("ab+") as file:
            created = file.tell() == 0
            if created:
                try:
                    # Pages that are missing at the first write would end the process (SIGBUS).
                    os.posix_fallocate(file.fileno(), 0, whole)
                except OSError as e:
                    path.unlink()
                    raise WeightsError(
                        f"{path}: no memory for {whole} bytes of weights ({e.strerror}); two"
                        " versions must fit: give the node or its container more shared memory"
                        " (docker: --shm-size), or set weights.directory to a larger file system"
                    ) from e
            elif file.tell() != whole:
                raise WeightsError(
                    f"{path} has {file.tell()} bytes, and these versions need {whole}: it belongs"
                    f" to another model or run; remove {self.folder}"
                )
        with path.open("rb+") as file:
            mapped = mmap.mmap(file.fileno(), whole)
        return np.frombuffer(mapped, dtype=np.uint8)[:size], created


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Return the first byte of each of these sizes in a file, and the end."""
    return [0, *itertools.accumulate(-(-size // PAGE) * PAGE for size in sizes)]


def node_name() -> str:
    """Return the name of this node: processes of the same name see the same shared memory."""
    return f"{socket.gethostname()}-{os.environ.get('GROUP_RANK', '0')}"


def hold(folder: Path) -> int:
    """Mark a folder of stores as used by this process while it lives; return the descriptor."""
    while True:
        with suppress(FileNotFoundError, FileExistsError):  # `remove_unused` was between
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / "users", os.O_RDWR | os.O_CREAT)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:
                return descriptor
            os.close(descriptor)


def remove_unused(parent: Path, prefix: str) -> None:
    """Remove folders that no living process of this node holds: those of killed runs.

    Files in shared memory that are named `<folder>.*` are removed with them.
    """
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError), (folder / "users").open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for shared in SHARED_MEMORY.glob(f"{folder.name}.*"):
                shared.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
