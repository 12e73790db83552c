"""The generators' end: versions in the stores of this node, checked and loaded from there.

A generator's own process holds the locks and compares the checksums, while decoding goes on; its
workers map the same files and copy what they keep.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from megatron_rl.messages import Manifest
from megatron_rl.weights.buckets import views
from megatron_rl.weights.manifest import WeightsError, checksum
from megatron_rl.weights.pinned import as_tensor, pin
from megatron_rl.weights.store import Store

CHECKS = 4
"""Threads that compare checksums."""


class NodeStores:
    """The stores of this node that have all buckets of a version; `pinned` with CUDA."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._known: dict[Path, tuple[Store, list[int]]] = {}

    def map(self, manifest: Manifest, folder: str) -> list[tuple[Store, list[int]]]:
        """Return the stores and the numbers of their buckets; map what is new.

        Args:
            manifest: the version.
            folder: of a store of all buckets; empty: the stores of the trainer's ranks.

        Raises:
            WeightsError: no store is there, or one of another model.
        """
        owners = [-1] if folder else sorted({bucket.owner for bucket in manifest.buckets})
        stores = []
        for owner in owners:
            path = Path(folder) if folder else Path(manifest.root) / str(owner)
            if path not in self._known:
                if not (path / "header").exists():
                    raise WeightsError(
                        f"weights version {manifest.version}: {path} has no store; generators on"
                        " other nodes than the trainer's need their node's store process, or set"
                        " weights.directory to a folder that all nodes share"
                    )
                numbers = manifest.buckets_of(owner)
                store = Store(path, [manifest.buckets[i].num_bytes for i in numbers])
                if self._pinned:
                    pin(store.regions()[1:3])
                self._known[path] = store, numbers
            stores.append(self._known[path])
        return stores

    @contextmanager
    def checked(self, manifest: Manifest, folder: str, seconds: float) -> Iterator[None]:
        """Hold a version that is complete and has the right checksums, until it is loaded.

        A store process compared them when the bytes arrived; others are compared here.

        Raises:
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
        """Yield the tensors of a checked version in the order of their names, as views."""
        named: list[tuple[str, torch.Tensor]] = []
        for store, numbers in self.map(manifest, folder):
            slot = _slot(store, manifest)
            for local, number in enumerate(numbers):
                flat = as_tensor(store.bucket(slot, local))
                named += views(manifest.buckets[number].tensors, flat)
        yield from sorted(named, key=lambda pair: pair[0])


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
