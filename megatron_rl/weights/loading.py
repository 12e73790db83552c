"""The generators' end: versions in the stores of this node, checked and loaded from there.

A generator's own process holds the locks and compares the checksums, while decoding goes on; its
workers map the same files and copy what they keep.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_rl.messages import Manifest
from megatron_rl.weights.buckets import as_tensor, pin, unpin, views
from megatron_rl.weights.manifest import WeightsError, checksum
from megatron_rl.weights.store import Store

CHECKS = 4  # threads that compare checksums


class _Mapped(NamedTuple):
    """A store that is mapped: its buckets' numbers in a manifest, its header's device and inode."""

    store: Store
    numbers: list[int]
    file: tuple[int, int]


class NodeStores:
    """The stores of this node that have all buckets of a version; `pinned` with CUDA.

    Those of the last version that was mapped are kept. Another folder, or new files in the same
    one, are those of another writer: the memory of the earlier one, which no file may name any
    more, is unmapped.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._known: dict[Path, _Mapped] = {}

    def map(self, manifest: Manifest, folder: str) -> list[tuple[Store, list[int]]]:
        """Return the stores and the numbers of their buckets; map what is new, unmap what is old.

        The store in `folder` has all buckets; empty: those of the trainer's ranks are taken.
        WeightsError: no store is there, or one of another model.
        """
        owners = _owners(manifest, folder)
        known = self._known.items()
        kept = [path for path, k in known if path in owners and k.file == _header_of(path)]
        self.forget(*kept)
        for path, owner in owners.items():
            if path in kept:
                continue
            if (file := _header_of(path)) is None:
                raise WeightsError(
                    f"weights version {manifest.version}: {path} has no store; generators on other"
                    " nodes than the trainer's need their node's store process, or set"
                    " weights.directory to a folder that all nodes share"
                )
            numbers = manifest.buckets_of(owner)
            store = Store(path, [manifest.buckets[i].num_bytes for i in numbers])
            if self._pinned:
                pin(store.regions()[1:3])
            self._known[path] = _Mapped(store, numbers, file)
        return self._of(manifest, folder)

    def forget(self, *kept: Path) -> None:
        """Unmap all stores but those of these folders."""
        for path in self._known.keys() - set(kept):
            known = self._known.pop(path)
            if self._pinned:
                unpin(known.store.regions()[1:3])

    def _of(self, manifest: Manifest, folder: str) -> list[tuple[Store, list[int]]]:
        return [self._known[path][:2] for path in _owners(manifest, folder)]

    @contextmanager
    def checked(self, manifest: Manifest, folder: str, seconds: float) -> Iterator[None]:
        """Hold a version that is complete and has the right checksums, until it is loaded.

        A store process compared them when the bytes arrived; others are compared here.
        WeightsError: it is missing, torn or replaced by a newer one.
        """
        with ExitStack() as locks:
            for store, numbers in self.map(manifest, folder):
                slot = _slot(store, manifest)
                locks.enter_context(store.locked(slot, write=False, seconds=seconds))
                _slot(store, manifest)  # it may have been replaced before the lock
                if not folder:
                    _compare(store, slot, numbers, manifest)
            yield

    def tensors(self, manifest: Manifest, folder: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a mapped version in the order of their names, as views.

        They are those in memory: the files may be gone by now.
        """
        named: list[tuple[str, torch.Tensor]] = []
        for store, numbers in self._of(manifest, folder):
            slot = _slot(store, manifest)
            for local, number in enumerate(numbers):
                flat = as_tensor(store.bucket(slot, local))
                named += views(manifest.buckets[number].tensors, flat)
        yield from sorted(named, key=lambda pair: pair[0])


def _owners(manifest: Manifest, folder: str) -> dict[Path, int]:
    """Return the owner of the buckets of each store, by its folder; -1: of all."""
    if folder:
        return {Path(folder): -1}
    return {Path(manifest.root) / str(b.owner): b.owner for b in manifest.buckets}


def _header_of(path: Path) -> tuple[int, int] | None:
    """Return (device, inode) of a store's header, None if there is none."""
    with suppress(FileNotFoundError):
        status = (path / "header").stat()
        return status.st_dev, status.st_ino
    return None


def _compare(store: Store, slot: int, numbers: list[int], manifest: Manifest) -> None:
    with ThreadPoolExecutor(CHECKS) as executor:
        sums = list(executor.map(checksum, (store.bucket(slot, i) for i in range(len(numbers)))))
    for number, sum_ in zip(numbers, sums, strict=True):
        if sum_ != manifest.buckets[number].checksum:
            raise WeightsError(
                f"weights version {manifest.version}: bucket {number} in {store.folder} has another"
                " checksum than announced: its bytes were changed or torn after the trainer wrote"
                " them; the old version stays"
            )


def _slot(store: Store, manifest: Manifest) -> int:
    slot = store.complete(manifest.version)
    if slot is None:
        raise WeightsError(
            f"weights version {manifest.version} is not complete in {store.folder}, whose newest is"
            f" {store.newest()}: it was announced too early, or replaced by a newer one"
        )
    return slot
