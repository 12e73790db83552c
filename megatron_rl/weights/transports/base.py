"""The two ends of every weight transport: a publisher on the trainer, a receiver at each worker.

    trainer                                             generator
    publish(v) -> manifest  --- orchestrator --->  begin(manifest)    decoding continues
                                                   poll() -> checked
                                                   load(manifest)     decoding is paused

A wrong version is refused before `load` by a transport that can hold a version next to the weights
in use; `nccl` cannot, and checks each bucket before a tensor of it is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch

from megatron_rl.messages import Manifest
from megatron_rl.weights.manifest import WeightsError

WeightStream = Iterator[tuple[str, torch.Tensor]]
"""Full tensors by Hugging Face name, in an order that is the same for every version."""

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""Puts named tensors into the model; `load_weights` of a vLLM model."""


class Publisher(ABC):
    """The trainer's end: makes versions that generators can take, and keeps those that are needed.

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

    @abstractmethod
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

    def release(self, version: int) -> None:
        """Allow the removal of `version` and older ones: no generator needs them any more."""
        self._released = max(self._released, version)
        self._remove_unneeded()

    def close(self) -> None:
        """Remove everything that was published."""
        removed, self._versions = self._versions, []
        self._remove(removed)

    @abstractmethod
    def _remove(self, versions: list[int]) -> None:
        """Free the bytes of these versions."""

    def _check_newer(self, version: int) -> None:
        if self._versions and version <= self._versions[-1]:
            raise WeightsError(
                f"weights version {version} was published after version {self._versions[-1]}:"
                " versions only grow"
            )

    def _add(self, version: int) -> None:
        self._versions.append(version)
        self._remove_unneeded()

    def _remove_unneeded(self) -> None:
        removed = [v for v in self._versions[: -self._keep] if v <= self._released]
        self._versions = [v for v in self._versions if v not in removed]
        self._remove(removed)


class Receiver:
    """A worker's end, in a process of the generator's engine.

    `begin` and `poll` of this class are those of a transport that receives within `load`.
    """

    def begin(self, manifest: Manifest) -> None:
        """Start to receive and check a version; returns at once."""

    def poll(self) -> bool:
        """Return True once the version can be loaded.

        Raises:
            WeightsError: it was refused; the model's weights are unchanged.
        """
        return True

    def load(self, manifest: Manifest, load_weights: LoadWeights) -> None:
        """Put the version into the model.

        Raises:
            WeightsError: it cannot be loaded whole; the model is between two versions then.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free everything that is held."""
