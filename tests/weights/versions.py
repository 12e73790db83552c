"""Write versions into stores as the trainer's ranks do, without a trainer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.messages import Bucket, Manifest, TensorInfo
from megatron_rl.trainer.publisher import complete_bucket
from megatron_rl.weights.buckets import offsets, tensor_bytes, tensor_info, views
from megatron_rl.weights.number_format import WireFormat
from megatron_rl.weights.store import NONE, Store, hold

SECONDS = 10.0
"""Longest wait for the lock of a slot."""


def as_sent(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return a checkpoint's tensors in the form in which they travel: experts one by one."""
    return {n: t.contiguous() for n, t in WireFormat(dtype).stream(iter(tensors.items()))}


class Versions:
    """The stores of some owners, `<root>/0` and so on, and the versions written into them.

    All versions have the tensors of the first one. As in a run, two are readable, and a third one
    replaces the first of them.
    """

    def __init__(
        self,
        root: Path,
        bucket_bytes: int = 2**20,
        owners: int = 1,
        nodes: tuple[str, ...] = (),
    ) -> None:
        self.root, self.bucket_bytes, self.owners, self.nodes = root, bucket_bytes, owners, nodes
        self.stores: list[Store] = []
        self._user = hold(root)
        self._previous = NONE

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> Manifest:
        """Write tensors (as they travel) as a version; return what the trainer would announce."""
        layout = self._layout(tensors)
        numbers = [[i for i in range(len(layout)) if i % self.owners == o] for o in self._owners]
        sizes = [offsets(infos)[1] for infos in layout]
        if not self.stores:
            self.stores = [
                Store(self.root / str(owner), [sizes[i] for i in own])
                for owner, own in enumerate(numbers)
            ]
        checksums = [""] * len(layout)
        for store, own in zip(self.stores, numbers, strict=True):
            assert list(store.places.sizes) == [sizes[i] for i in own], "other tensors than before"
            slot = store.slot_for(version)
            with store.locked(slot, write=True, seconds=SECONDS):
                store.header.versions_2N[slot] = NONE
                for local, i in enumerate(own):
                    checksums[i] = self._fill(store, slot, local, layout[i], tensors, version)
        self._previous = version
        buckets = tuple(
            Bucket(i % self.owners, layout[i], sizes[i], checksums[i]) for i in range(len(layout))
        )
        return Manifest(version=version, buckets=buckets, root=str(self.root), nodes=self.nodes)

    def bucket(self, version: int, number: int) -> Tensor:
        """Return the bytes of a bucket of the manifest, to be changed by a test."""
        store = self.stores[number % self.owners]
        slot = store.complete(version)
        assert slot is not None
        return torch.from_numpy(store.bucket(slot, number // self.owners))

    def close(self) -> None:
        """Remove all stores; their mappings stay valid."""
        os.close(self._user)
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def _owners(self) -> range:
        return range(self.owners)

    def _layout(self, tensors: Mapping[str, Tensor]) -> list[tuple[TensorInfo, ...]]:
        layout: list[list[TensorInfo]] = []
        filled = self.bucket_bytes
        for name, tensor in tensors.items():
            info = tensor_info(name, tensor)
            if filled + tensor_bytes(info) > self.bucket_bytes:
                layout.append([])
                filled = 0
            layout[-1].append(info)
            filled += tensor_bytes(info)
        return [tuple(infos) for infos in layout]

    def _fill(
        self,
        store: Store,
        slot: int,
        local: int,
        infos: tuple[TensorInfo, ...],
        tensors: Mapping[str, Tensor],
        version: int,
    ) -> str:
        """Write a bucket and its difference; return its checksum."""
        data = store.bucket(slot, local)
        for name, view in views(infos, torch.from_numpy(data)):
            view.copy_(tensors[name])
        return complete_bucket(store, slot, local, self._previous, version)
