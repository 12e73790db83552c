"""Transport `nccl`: from GPU to GPU, by vLLM's packed broadcast.

Senders: one trainer rank per pipeline stage and expert group, each with the tensors that it joined
(`export(spread=True)`), so that no rank gathers the whole model. Each holds its part of the newest
versions in pinned host memory, which later versions reuse, and serves an engine on request
(`requests`), one engine at a time, while training continues. Sender and workers of an engine have
their own communicator:

    NCCL rank 0: the sender        NCCL rank 1 + w: worker w of the engine

It is made at the first request, from an id that the sender makes. The bytes are packed by vLLM's
rule (`nccl_plan.chunk_counts`), so a bucket of the manifest is a chunk, and its checksum
(`device_checksum`) is compared on the GPU before a tensor of it is loaded. A worker cannot hold a
second copy of a large model, so a wrong bucket is detected between two versions: the generator then
ends with the error.
NCCL has no time-outs: at the end of `timeouts.transfer_seconds` the communicator is aborted.
"""

from __future__ import annotations

import base64
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.messages import Manifest
from megatron_rl.weights.buckets import reject_doubled_names, tensor_bytes, tensor_info
from megatron_rl.weights.device_checksum import device_checksum, word_sum
from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.rendezvous import Rendezvous
from megatron_rl.weights.transports.base import LoadWeights, Publisher, Receiver, WeightStream
from megatron_rl.weights.transports.nccl_communicator import bounded, connect, new_unique_id
from megatron_rl.weights.transports.nccl_plan import (
    BUFFERS,
    TRANSFERS_AT_ONCE,
    CheckedLoad,
    Part,
    chunk_counts,
    join_parts,
    split_parts,
)
from megatron_rl.weights.transports.requests import (
    ReceivingWorker,
    TransferClient,
    TransferRequest,
    TransferService,
)


class NcclPublisher(Publisher):
    """One trainer rank's end; every trainer rank has one, and publishing is collective.

    Args:
        rendezvous: the run's store.
        rank: trainer rank.
        engines: number of engines.
        workers: worker processes of one engine.
        seconds: time-out of one transfer, `timeouts.transfer_seconds`.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, engines: int, workers: int, seconds: float
    ) -> None:
        super().__init__()
        self._rendezvous, self._rank, self._engines = rendezvous, rank, engines
        self._workers, self._seconds = workers, seconds
        self._held: dict[int, list[tuple[str, Tensor]]] = {}
        self._unused: list[dict[str, Tensor]] = []
        """Pinned memory of versions that were removed."""
        self._lock = threading.Lock()
        self._transfers = threading.Semaphore(TRANSFERS_AT_ONCE)
        self._links: list[_SenderLink] = []
        self._services: list[TransferService] = []
        self.bucket_bytes = 0
        """A chunk ends with the tensor that takes it over this size."""

    def publish(self, version: int, stream: WeightStream, bucket_bytes: int) -> Manifest | None:
        """Copy this rank's tensors into pinned memory; returns the manifest on rank 0."""
        for service in self._services:
            service.raise_if_failed()
        self._check_newer(version)
        self.bucket_bytes = bucket_bytes
        held: list[tuple[str, Tensor]] = []
        sums: list[Tensor] = []
        with self._lock:
            buffers = self._unused.pop() if self._unused else {}
        for name, tensor in reject_doubled_names(stream, version):
            pinned = buffers[name] if name in buffers else _pinned_like(tensor)
            held.append((name, pinned.copy_(tensor.detach())))
            sums.append(word_sum(tensor))
        part = self._part(held, sums, bucket_bytes)
        with self._lock:
            self._held[version] = held
        self._add(version)
        if held and not self._services:
            self._serve()
        parts = self._gather(part)
        return None if parts is None else join_parts(version, [p for p in parts if p.tensors])

    def release(self, version: int) -> None:
        """Allow the removal of `version` and older ones; the other ranks learn it at `publish`."""
        self._released = max(self._released, version)

    def close(self) -> None:
        """End the service."""
        for service in self._services:
            service.close()
        for link in self._links:
            link.abort()
        super().close()
        for buffers in self._unused:
            for pinned in buffers.values():
                torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr())
        self._unused.clear()

    @contextmanager
    def turn(self, request: TransferRequest) -> Iterator[None]:
        """Wait until another transfer may begin.

        Raises:
            WeightsError: none may at the request's deadline.
        """
        if not self._transfers.acquire(timeout=request.seconds_left):
            raise WeightsError(
                f"weights version {request.version}: the transfers to other generators took longer"
                " than timeouts.transfer_seconds; raise it"
            )
        try:
            yield
        finally:
            self._transfers.release()

    def _part(self, held: list[tuple[str, Tensor]], sums: list[Tensor], bucket_bytes: int) -> Part:
        infos = tuple(tensor_info(name, tensor) for name, tensor in held)
        numbers: list[int] = torch.stack(sums).tolist() if sums else []
        counts = chunk_counts([tensor_bytes(info) for info in infos], bucket_bytes)
        entries, rest = iter(infos), iter(numbers)
        checksums = tuple(
            device_checksum(list(islice(entries, count)), list(islice(rest, count)))
            for count in counts
        )
        return Part(self._rank, infos, tuple(counts), checksums)

    def _gather(self, part: Part) -> list[Part] | None:
        """Return all parts on rank 0, after it told the other ranks the released version."""
        released = [self._released]
        dist.broadcast_object_list(released, src=0)
        super().release(released[0])
        parts: list[Any] | None = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(part, parts, dst=0)
        return parts

    def _serve(self) -> None:
        device = torch.cuda.current_device()
        for engine in range(self._engines):
            link = _SenderLink(self, 1 + self._workers, device)
            self._links.append(link)
            ends = (self._rendezvous, self._rank, engine, self._workers)
            service = TransferService(*ends, self._seconds, link.offer, link.send)
            self._services.append(service)

    def tensors(self, version: int) -> list[tuple[str, Tensor]]:
        """Return this rank's tensors of a version, if it is still held."""
        with self._lock:
            held = self._held.get(version)
        if held is None:
            raise WeightsError(f"only versions {list(self.versions)} are held")
        return held

    def _remove(self, versions: list[int]) -> None:
        with self._lock:
            self._unused += [dict(self._held.pop(version)) for version in versions]


def _pinned_like(tensor: Tensor) -> Tensor:
    """Return pinned memory for a tensor; torch's allocator would round up to a power of two.

    Raises:
        WeightsError: the host has too little.
    """
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    error = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0))
    if error:
        raise WeightsError(
            f"the host cannot pin {flat.numel():,} bytes for the weights (CUDA error {error});"
            " `megatron-rl plan` counts what a node needs"
        )
    return flat.view(tensor.dtype).view(tensor.shape)


class _SenderLink:
    """The communicator between this rank and the workers of one engine, used by one thread."""

    def __init__(self, publisher: NcclPublisher, size: int, device: int) -> None:
        self._publisher, self._size, self._device = publisher, size, device
        self._unique_id: bytes | None = None
        self._communicator: Any = None

    def offer(self, version: int) -> dict[str, Any]:
        """Return the answer to a request; a new id makes the workers make a new communicator."""
        tensors = self._publisher.tensors(version)
        if self._unique_id is None:
            self._unique_id = new_unique_id()
        text = base64.b64encode(self._unique_id).decode()
        return {
            "unique_id": text,
            "tensors": len(tensors),
            "bucket_bytes": self._publisher.bucket_bytes,
        }

    def send(self, request: TransferRequest) -> None:
        """Send the version to all workers."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.set_device(self._device)
        assert self._unique_id is not None
        try:
            if self._communicator is None:
                self._communicator = connect(self._unique_id, 0, self._size, request)
            with self._publisher.turn(request), bounded(self._communicator, request):
                packed_nccl_broadcast_producer(
                    (
                        (name, tensor.to(f"cuda:{self._device}", non_blocking=True))
                        for name, tensor in self._publisher.tensors(request.version)
                    ),
                    self._communicator,
                    src=0,
                    post_iter_func=lambda named: named[1],
                    buffer_size_bytes=self._publisher.bucket_bytes,
                    num_buffers=BUFFERS,
                )
        except RuntimeError:
            self.abort()
            raise

    def abort(self) -> None:
        """Destroy the communicator; the next request makes another."""
        if self._communicator is not None:
            self._communicator.destroy()
        self._communicator = self._unique_id = None


class NcclReceiver(Receiver):
    """A worker's end; there is no memory for a second version, so `load` receives it."""

    def __init__(self, worker: ReceivingWorker) -> None:
        self._worker = worker
        self._clients: dict[int, TransferClient] = {}
        self._communicators: dict[int, tuple[bytes, Any]] = {}

    def load(self, manifest: Manifest, load_weights: LoadWeights) -> None:
        """Receive from one sender after the other; each chunk is checked, then loaded."""
        for part in split_parts(manifest):
            self._load_part(manifest.version, part, load_weights)

    def close(self) -> None:
        """Destroy the communicators."""
        for _, communicator in self._communicators.values():
            communicator.destroy()
        self._communicators.clear()

    def _load_part(self, version: int, part: Part, load_weights: LoadWeights) -> None:
        answers: list[dict[str, Any]] = []

        def agree(answer: dict[str, Any]) -> None:
            sizes = [tensor_bytes(info) for info in part.tensors]
            counts = chunk_counts(sizes, answer["bucket_bytes"])
            if answer["tensors"] != len(part.tensors) or tuple(counts) != part.counts:
                raise WeightsError(
                    f"weights version {version}: trainer rank {part.sender} sends"
                    f" {answer['tensors']} tensors in chunks of {answer['bucket_bytes']} bytes, the"
                    f" manifest announces {len(part.tensors)} in chunks of {part.counts[:8]}"
                    " tensors; give every role one configuration"
                )
            answers.append(answer)

        def receive(request: TransferRequest) -> None:
            from vllm.distributed.weight_transfer.packed_tensor import (
                packed_nccl_broadcast_consumer,
            )

            communicator = self._communicator(part.sender, answers[-1]["unique_id"], request)
            with bounded(communicator, request):
                packed_nccl_broadcast_consumer(
                    (
                        (info.name, (list(info.shape), getattr(torch, info.dtype)))
                        for info in part.tensors
                    ),
                    communicator,
                    src=0,
                    post_unpack_func=CheckedLoad(version, part, load_weights),
                    buffer_size_bytes=answers[-1]["bucket_bytes"],
                    num_buffers=BUFFERS,
                    device=f"cuda:{torch.cuda.current_device()}",
                )

        if part.sender not in self._clients:
            self._clients[part.sender] = TransferClient(self._worker, part.sender)
        self._clients[part.sender].take(version, agree, receive)

    def _communicator(self, sender: int, unique_id: str, request: TransferRequest) -> Any:
        wanted = base64.b64decode(unique_id)
        held, communicator = self._communicators.get(sender, (b"", None))
        if held != wanted:
            if communicator is not None:
                communicator.destroy()
            communicator = connect(wanted, self._worker.rank, self._worker.ranks, request)
            self._communicators[sender] = (wanted, communicator)
        return communicator
