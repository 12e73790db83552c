"""Transport `gloo`: flat buckets in host memory, broadcast to an engine's workers on request.

The trainer keeps the newest versions in memory (`base.Publisher`). Each transfer has its own
process group (sender: rank 0, worker w: rank w + 1), which costs a few milliseconds and keeps the
remains of a failed one from the next. A worker receives into host memory and compares every
checksum (blake2b-128 of the flat bucket) while its engine continues to decode; only then is
anything loaded. Memory of each worker: the whole version, in addition to the weights in use.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.messages import Manifest, TensorInfo
from megatron_rl.weights.buckets import flatten, into_buckets, manifest_of, offsets, unflatten
from megatron_rl.weights.manifest import WeightsError, checksum
from megatron_rl.weights.rendezvous import Rendezvous
from megatron_rl.weights.transports.base import LoadWeights, Publisher, Receiver, WeightStream
from megatron_rl.weights.transports.requests import (
    ReceivingWorker,
    TransferClient,
    TransferRequest,
    TransferService,
    in_background,
)

SENDER = 0
"""Trainer rank that sends."""


class GlooPublisher(Publisher):
    """Holds versions in host memory and serves each engine from a thread of its own.

    Args:
        rendezvous: the run's store.
        engines: number of engines.
        workers: worker processes of one engine.
        seconds: time-out of one transfer, `timeouts.transfer_seconds`.
    """

    def __init__(self, rendezvous: Rendezvous, engines: int, workers: int, seconds: float) -> None:
        super().__init__()
        self._rendezvous, self._workers = rendezvous, workers
        self._held: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()
        self._services = [
            TransferService(rendezvous, SENDER, engine, workers, seconds, self._offer, self._send)
            for engine in range(engines)
        ]

    def publish(self, version: int, stream: WeightStream, bucket_bytes: int) -> Manifest:
        """Copy the version into memory, ready for requests."""
        self.raise_if_failed()
        self._check_newer(version)
        flats: list[Tensor] = []
        entries: list[list[TensorInfo]] = []
        for bucket in into_buckets(stream, bucket_bytes, version):
            infos, flat = flatten(bucket)
            flats.append(flat)
            entries.append(infos)
        buckets = {f"{i:05d}": checksum(flat.numpy()) for i, flat in enumerate(flats)}
        manifest = manifest_of(version, buckets, entries, transport="gloo")
        with self._lock:
            self._held[version] = flats
        self._add(version)
        return manifest

    def raise_if_failed(self) -> None:
        """Raise the first failure of a transfer since the last call, as `WeightsError`."""
        for service in self._services:
            service.raise_if_failed()

    def close(self) -> None:
        """End the service."""
        for service in self._services:
            service.close()
        super().close()

    def _remove(self, versions: list[int]) -> None:
        with self._lock:
            for version in versions:
                del self._held[version]

    def _offer(self, version: int) -> dict[str, Any]:
        return {"sizes": [flat.numel() for flat in self._flats(version)]}

    def _send(self, request: TransferRequest) -> None:
        flats = self._flats(request.version)
        group = _join(request, self._rendezvous, 0, 1 + self._workers)
        for flat in flats:
            _broadcast(group, flat)

    def _flats(self, version: int) -> list[Tensor]:
        with self._lock:
            flats = self._held.get(version)
        if flats is None:
            raise WeightsError(f"only versions {list(self.versions)} are held")
        return flats


class GlooReceiver(Receiver):
    """A worker's end."""

    def __init__(self, worker: ReceivingWorker) -> None:
        self._worker = worker
        self._client = TransferClient(worker, SENDER)
        self._work: Future[None] | None = None
        self._checked: tuple[Manifest, list[Tensor]] | None = None

    def begin(self, manifest: Manifest) -> None:
        """Request the version and receive it in the background."""
        if self._work is not None and not self._work.done():
            raise WeightsError(
                f"weights version {manifest.version}: an earlier transfer is still under way; a"
                " generator takes one version at a time"
            )
        self._checked = None
        self._work = in_background(lambda: self._receive(manifest), f"weights {manifest.version}")

    def poll(self) -> bool:
        """Return True once every byte is received and checked."""
        if self._work is None or not self._work.done():
            return False
        self._work.result()
        return True

    def load(self, manifest: Manifest, load_weights: LoadWeights) -> None:
        """Load the version that was received."""
        if self._checked is None or self._checked[0].version != manifest.version:
            raise WeightsError(
                f"weights version {manifest.version} was not received before it is loaded"
            )
        (received, flats), self._checked = self._checked, None
        load_weights(_named(received, flats))

    def close(self) -> None:
        """Free the version that was received."""
        self._checked = None

    def _receive(self, manifest: Manifest) -> None:
        sizes = [offsets(infos)[1] for infos in _infos_by_bucket(manifest)]

        def agree(answer: dict[str, Any]) -> None:
            if answer["sizes"] != sizes:
                raise WeightsError(
                    f"weights version {manifest.version}: the trainer sends buckets of"
                    f" {answer['sizes'][:8]} bytes, the manifest announces {sizes[:8]}: truncated;"
                    " publish the version again"
                )

        def receive(request: TransferRequest) -> None:
            flats = self._take(manifest.version, request, sizes)
            _compare(manifest, flats)
            self._checked = (manifest, flats)

        self._client.take(manifest.version, agree, receive)

    def _take(self, version: int, request: TransferRequest, sizes: list[int]) -> list[Tensor]:
        flats: list[Tensor] = []
        try:
            worker = self._worker
            group = _join(request, worker.rendezvous, worker.rank, worker.ranks)
            for size in sizes:
                flat = torch.empty(size, dtype=torch.uint8)
                _broadcast(group, flat)
                flats.append(flat)
        except RuntimeError as e:
            raise WeightsError(
                f"weights version {version}: the transfer broke off after {len(flats)} of"
                f" {len(sizes)} buckets, or took longer than timeouts.transfer_seconds ({e})"
            ) from e
        return flats


def _compare(manifest: Manifest, flats: list[Tensor]) -> None:
    for name, flat, expected in zip(manifest.buckets, flats, manifest.checksums, strict=True):
        actual = checksum(flat.numpy())
        if actual != expected:
            raise WeightsError(
                f"weights version {manifest.version}, bucket {name}: checksum {actual}, the"
                f" manifest says {expected}; the bytes were changed on the way: publish the"
                " version again"
            )


def _infos_by_bucket(manifest: Manifest) -> Iterator[tuple[TensorInfo, ...]]:
    tensors = iter(manifest.tensors)
    return (tuple(islice(tensors, count)) for count in manifest.bucket_tensors)


def _named(manifest: Manifest, flats: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    for infos, flat in zip(_infos_by_bucket(manifest), flats, strict=True):
        yield from unflatten(infos, flat)


def _join(request: TransferRequest, rendezvous: Rendezvous, rank: int, size: int) -> Any:
    """Return the process group of one transfer; its collectives have the request's time-out."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=request.seconds_left)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(rendezvous))]
    store = dist.PrefixStore(f"{request.base}group/{request.number}", request.store)
    return dist.ProcessGroupGloo(store, rank, size, options)


def _own_address(rendezvous: Rendezvous) -> str:
    """Return the address by which this host reaches the store, and the others reach this host."""
    family, kind, _, _, address = socket.getaddrinfo(
        rendezvous.host, rendezvous.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        own = probe.getsockname()[0]
    return str(ipaddress.ip_address(own.partition("%")[0]))


def _broadcast(group: Any, flat: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([flat], options).wait()
