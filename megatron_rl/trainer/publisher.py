"""The trainer's end: every rank keeps the buckets that it joins in a store of its own.

The export goes straight into the store's slot. In the background, every rank makes differences and
checksums, and rank 0 announces the manifest when every rank's part is complete. The trainer waits
for the copy of its own shards and for nothing else. A slot is written again two versions later;
until then the orchestrator gives no batch while anyone still reads it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_rl.config import RunConfig
from megatron_rl.messages import Bucket, Manifest
from megatron_rl.trainer.export import export_buckets, plan_of, planned_tensors
from megatron_rl.weights import difference, store_process
from megatron_rl.weights.buckets import offsets, pin, tensor_info, views
from megatron_rl.weights.manifest import WeightsError, checksum
from megatron_rl.weights.number_format import WireFormat
from megatron_rl.weights.store import FOLDER_PREFIX, NONE, SHARED_MEMORY, Store, hold, remove_unused

if TYPE_CHECKING:
    from megatron_rl.trainer.shards import ModelShards

Announce = Callable[[Manifest, float], None]


class Publisher:
    """This rank's store and its part in every version; collective over the trainer ranks.

    `announce` is called on rank 0, in a thread, with each complete version and the seconds that it
    took. WeightsError: the folder is too small for two versions, or not writable.
    """

    def __init__(
        self, config: RunConfig, policy: ModelShards, node: str, announce: Announce | None
    ) -> None:
        self._config, self._policy, self._announce = config, policy, announce
        self._rank = dist.get_rank()
        self._wire = WireFormat.of(config)
        self._plan = plan_of(policy, config.weights.bucket_bytes, self._wire.dtype, spread=True)
        streams = [self._wire.stream(planned_tensors(self._plan, b)) for b in self._plan.buckets]
        self._layout = [tuple(tensor_info(*named) for named in stream) for stream in streams]
        seconds = config.timeouts.transfer_seconds
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        parent = config.weights.directory or SHARED_MEMORY
        parent.mkdir(parents=True, exist_ok=True)
        if config.weights.directory is None:  # other nodes' locks may be invisible in a shared one
            remove_unused(parent, FOLDER_PREFIX)
        # The folder of this run's stores, the same on all ranks, and the ranks' nodes.
        name = [Path(tempfile.mktemp(prefix=FOLDER_PREFIX, dir=parent))]
        dist.broadcast_object_list(name, group=self._group)
        self.root, self._node, self._nodes = name[0], node, [""] * dist.get_world_size()
        dist.all_gather_object(self._nodes, node, group=self._group)
        self._own = [i for i, b in enumerate(self._plan.buckets) if b.destination == self._rank]
        self._sizes = [offsets(infos)[1] for infos in self._layout]
        self._user = hold(self.root)
        self._store = Store(self.root / str(self._rank), [self._sizes[i] for i in self._own])
        pin(self._store.regions())
        self._previous, cuda = NONE, torch.cuda.is_available()
        self._pending: Future[None] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        # A new thread of a process has device 0.
        device = (torch.cuda.set_device, (torch.cuda.current_device(),)) if cuda else (None, ())
        self._thread = ThreadPoolExecutor(1, "weights", *device)

    def serve_other_nodes(self, endpoint: Callable[[], str]) -> None:
        """Start a process that other nodes can read from, on the first rank of each node."""
        shared, timeouts = self._config.weights.directory is not None, self._config.timeouts
        one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        if shared or one_node or self._nodes.index(self._node) != self._rank:
            return
        self._server = store_process.start(
            store_process.StoreSpec(
                name=f"trainer-store-{self._node}",
                node=self._node,
                endpoint=endpoint(),
                folder=str(self.root),
                transfer_seconds=timeouts.transfer_seconds,
                peer_seconds=timeouts.peer_seconds,
                shutdown_seconds=timeouts.shutdown_seconds,
                rejoin_seconds=timeouts.rejoin_seconds,
                serves_trainer=True,
            )
        )

    def publish(self, version: int) -> None:
        """Copy the current weights into the store, and complete the version in the background.

        `version` is the number of optimizer steps that made these weights. WeightsError: it does
        not grow, a full file system, a slot that is still read, or what went wrong with the version
        before.
        """
        started = time.monotonic()
        self.wait()
        if version <= self._previous:
            raise WeightsError(
                f"weights version {version} was published after version {self._previous}: versions"
                " only grow"
            )
        store, limit = self._store, self._config.timeouts.transfer_seconds
        slot = store.slot_for(version)
        with store.locked(slot, write=True, seconds=limit):
            store.header.versions_2N[slot] = NONE
            for local, (number, named) in enumerate(export_buckets(self._policy, self._plan)):
                flat = torch.from_numpy(store.bucket(slot, local))
                infos, tensors = self._layout[number], self._wire.stream(named)
                for tensor, info, target in zip(tensors, infos, views(infos, flat), strict=True):
                    if (exported := tensor_info(*tensor)) != info:
                        raise WeightsError(
                            f"weights version {version}: the export has {exported} where {info} was"
                            " planned; the model changed after the first version"
                        )
                    target[1].copy_(tensor[1], non_blocking=True)
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
        previous, self._previous = self._previous, version
        self._pending = self._thread.submit(self._complete, version, previous, slot, started)

    def _complete(self, version: int, previous: int, slot: int, started: float) -> None:
        buckets = range(len(self._own))
        checksums = [complete_bucket(self._store, slot, i, previous, version) for i in buckets]
        parts = [[""]] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(checksums, parts, group=self._group)
        if parts is None or self._announce is None:
            return
        rests = [iter(part) for part in parts]
        planned = tuple(
            Bucket(b.destination, infos, size, next(rests[b.destination]))
            for b, infos, size in zip(self._plan.buckets, self._layout, self._sizes, strict=True)
        )
        nodes = () if self._config.weights.directory else tuple(sorted(set(self._nodes)))
        manifest = Manifest(version=version, buckets=planned, root=str(self.root), nodes=nodes)
        self._announce(manifest, time.monotonic() - started)

    def raise_if_failed(self) -> None:
        """Raise what went wrong with the last version, if it has failed."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last version is complete; raise what went wrong with it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Remove this rank's store, after the last version is complete or has failed."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
        self._thread.shutdown(wait=True)
        os.close(self._user)
        shared = self._config.weights.directory is not None
        whole = shared and self._rank == 0  # ranks leave together (`train`)
        shutil.rmtree(self.root if whole else self._store.folder, ignore_errors=True)
        if not shared:
            remove_unused(self.root.parent, self.root.name)


def complete_bucket(store: Store, slot: int, bucket: int, previous: int, version: int) -> str:
    """Make a written bucket readable, with its difference to version `previous` if that is here.

    Returns its checksum.
    """
    data = store.bucket(slot, bucket)
    if (before := store.header.slot_of(bucket, previous)) is not None:
        old, new = torch.from_numpy(store.bucket(before, bucket)), torch.from_numpy(data)
        made = difference.encode_on_device(old, new, store.largest_difference(bucket))
        if made is not None:
            store.put_difference(bucket, previous, version, made.numpy())
    store.header.versions_2N[slot, bucket] = version
    return checksum(data)
