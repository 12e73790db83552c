"""The two ends of every weight transport: a publisher on the trainer, a receiver at each worker.

    trainer                                             generator
    publish(v) -> manifest  --- orchestrator --->  begin(manifest)    decoding continues
                                                   poll() -> checked
                                                   load(manifest)     decoding is paused

A wrong version is refused before `load` by a transport that can hold a version next to the weights
in use; `nccl` cannot, and checks each bucket before a tensor of it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from megatron_rl.messages import Manifest
from megatron_rl.weights.manifest import WeightsError

WeightStream = Iterator[tuple[str, torch.Tensor]]
"""Full tensors by Hugging Face name, in an order that is the same for every version."""

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""Puts named tensors into the model; `load_weights` of a vLLM model."""


class Publisher(Protocol):
    """The trainer's end: makes versions that generators can take."""

    def publish(self, version: int, stream: WeightStream, bucket_bytes: int) -> Manifest | None:
        """Store a version, for generators to take, and return its manifest (on trainer rank 0).

        Args:
            version: optimizer steps that made these weights; larger than all before.
            stream: full tensors by Hugging Face name; consumed bucket by bucket.
            bucket_bytes: tensors are gathered up to this size; a larger one is its own bucket.

        Raises:
            WeightsError: a version that is not newer, a doubled name, a full disk, or an earlier
                version did not reach a generator.
        """
        ...

    def release(self, version: int) -> None:
        """Allow the removal of `version` and older ones: no generator needs them any more."""
        ...

    def close(self) -> None:
        """Remove everything that was published."""
        ...


class Receiver(Protocol):
    """A worker's end, in a process of the generator's engine."""

    def begin(self, manifest: Manifest) -> None:
        """Start to receive and check a version; returns at once."""
        ...

    def poll(self) -> bool:
        """Return True once the version can be loaded.

        Raises:
            WeightsError: it was refused; the model's weights are unchanged.
        """
        ...

    def load(self, manifest: Manifest, load_weights: LoadWeights) -> None:
        """Put the version into the model.

        Raises:
            WeightsError: it cannot be loaded whole; the model is between two versions then.
        """
        ...

    def close(self) -> None:
        """Free everything that is held."""
        ...


class VersionRetention:
    """The published versions that must be kept.

    The newest `keep` always are. Older ones are kept until `release` says that no generator needs
    them, so a slow generator never loses its version.
    """

    def __init__(self, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least the newest version is kept (keep >= 1)")
        self._keep = keep
        self._versions: list[int] = []
        self._released = -1

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that are kept, oldest first."""
        return tuple(self._versions)

    def check_newer(self, version: int) -> None:
        """Refuse a version that is not newer than all before.

        Raises:
            WeightsError: it is not.
        """
        if self._versions and version <= self._versions[-1]:
            raise WeightsError(
                f"weights version {version} was published after version {self._versions[-1]}:"
                " versions only grow"
            )

    def add(self, version: int) -> list[int]:
        """Add a published version; return those to be removed."""
        self._versions.append(version)
        return self._unneeded()

    def release(self, version: int) -> list[int]:
        """Note that `version` and older ones are not needed; return those to be removed."""
        self._released = max(self._released, version)
        return self._unneeded()

    def clear(self) -> list[int]:
        """Keep nothing any more; return the versions that were kept."""
        removed, self._versions = self._versions, []
        return removed

    def _unneeded(self) -> list[int]:
        removed = [v for v in self._versions[: -self._keep] if v <= self._released]
        self._versions = [v for v in self._versions if v not in removed]
        return removed
