"""The chunks that the senders of the transport `nccl` send, and their checks; needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from megatron_rl.messages import Manifest, TensorInfo
from megatron_rl.weights.buckets import manifest_of
from megatron_rl.weights.device_checksum import checksum_of
from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.transports.base import LoadWeights

BUFFERS = 2
"""Chunks in transit at once, each on its own stream."""
TRANSFERS_AT_ONCE = 1
"""Engines that a sender serves at a time; each takes buffers of its own on the sender's GPU."""


def chunk_counts(sizes: Sequence[int], bucket_bytes: int) -> list[int]:
    """Return the number of tensors of each chunk, for tensors of these sizes in bytes."""
    counts, count, filled = [], 0, 0
    for size in sizes:
        count, filled = count + 1, filled + size
        if filled > bucket_bytes:
            counts.append(count)
            count = filled = 0
    return [*counts, count] if count else counts


@dataclass(frozen=True, slots=True)
class Part:
    """One sender's share of a version, without the bytes."""

    sender: int
    """Trainer rank."""
    tensors: tuple[TensorInfo, ...]
    counts: tuple[int, ...]
    """Tensors of each chunk."""
    checksums: tuple[str, ...]
    """Of each chunk."""

    def chunks(self) -> Iterator[tuple[tuple[TensorInfo, ...], str]]:
        """Yield (tensors, checksum) of each chunk."""
        tensors = iter(self.tensors)
        for count, checksum in zip(self.counts, self.checksums, strict=True):
            yield tuple(islice(tensors, count)), checksum


def join_parts(version: int, parts: Iterable[Part]) -> Manifest:
    """Return the manifest of a version that several ranks send."""
    ordered = sorted(parts, key=lambda part: part.sender)
    chunks = [(p.sender, i, *c) for p in ordered for i, c in enumerate(p.chunks())]
    return manifest_of(
        version,
        {f"{sender}/{i:05d}": checksum for sender, i, _, checksum in chunks},
        [infos for _, _, infos, _ in chunks],
        transport="nccl",
        senders=tuple(sender for sender, *_ in chunks),
    )


def split_parts(manifest: Manifest) -> list[Part]:
    """Return the parts that `join_parts` joined."""
    by_sender: dict[int, list[tuple[tuple[TensorInfo, ...], int, str]]] = {}
    tensors = iter(manifest.tensors)
    for sender, count, checksum in zip(
        manifest.senders, manifest.bucket_tensors, manifest.checksums, strict=True
    ):
        chunk = (tuple(islice(tensors, count)), count, checksum)
        by_sender.setdefault(sender, []).append(chunk)
    return [
        Part(
            sender,
            tuple(info for infos, _, _ in chunks for info in infos),
            tuple(count for _, count, _ in chunks),
            tuple(checksum for _, _, checksum in chunks),
        )
        for sender, chunks in sorted(by_sender.items())
    ]


class CheckedLoad:
    """Takes the chunks of a part in their order: compares the checksum, then loads."""

    def __init__(self, version: int, part: Part, load_weights: LoadWeights) -> None:
        self._version, self._sender, self._load = version, part.sender, load_weights
        self._chunks = enumerate(part.chunks())

    def __call__(self, named: list[tuple[str, Tensor]]) -> None:
        """Check and load one chunk.

        Raises:
            WeightsError: other bytes than the manifest announces.
        """
        number, (infos, expected) = next(self._chunks)
        actual = checksum_of(infos, [tensor for _, tensor in named])
        if actual != expected:
            raise WeightsError(
                f"weights version {self._version}, bucket {self._sender}/{number:05d}: checksum"
                f" {actual}, the manifest says {expected}; the bytes were changed on the way: the"
                " engine is between two versions, start the generator again"
            )
        self._load(named)
