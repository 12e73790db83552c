"""Transports of a weight version from the trainer to the generators: one file each.

Both ends of `weights.transport` are chosen here, and nowhere else.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.messages import Manifest
from megatron_rl.weights.rendezvous import Rendezvous
from megatron_rl.weights.transports.base import Publisher, Receiver
from megatron_rl.weights.transports.requests import ReceivingWorker


def refuse_contradictions(config: RunConfig, *, cuda: bool) -> None:
    """Refuse a transport that this machine's devices do not support.

    Args:
        config: the run.
        cuda: True if torch finds a CUDA device.

    Raises:
        ConfigError: names the key and the remedy.
    """
    if config.weights.transport == "nccl" and not cuda:
        raise ConfigError(
            "weights.transport is 'nccl': it moves weights between GPUs, and torch finds no CUDA"
            " device here; use 'gloo' or 'disk'"
        )


def open_publisher(config: RunConfig, rank: int, rendezvous: Rendezvous) -> Publisher | None:
    """Return this trainer rank's publisher; None on a rank that takes no part.

    Args:
        config: its `weights`, `roles` and `timeouts.transfer_seconds` are used.
        rank: trainer rank.
        rendezvous: the run's store.

    Raises:
        ConfigError: the transport cannot work on this machine.
    """
    import torch

    refuse_contradictions(config, cuda=torch.cuda.is_available())
    workers = config.roles.generator_tensor_parallel
    seconds = config.timeouts.transfer_seconds
    match config.weights.transport:
        case "disk":
            from megatron_rl.weights.transports.disk import DiskPublisher

            root = config.weights.directory or Path("/dev/shm")
            return DiskPublisher(root / f"megatron_rl_{os.getpid()}") if rank == 0 else None
        case "gloo":
            from megatron_rl.weights.transports.gloo import SENDER, GlooPublisher

            if rank != SENDER:
                return None
            return GlooPublisher(rendezvous, config.roles.engines, workers, seconds)
        case "nccl":
            from megatron_rl.weights.transports.nccl import NcclPublisher

            return NcclPublisher(rendezvous, rank, config.roles.engines, workers, seconds)


@dataclass(frozen=True, slots=True)
class ReceiverInfo:
    """Settings with which a worker of an engine opens its receiver; travel as a dict."""

    transport: str
    engine: int
    workers: int
    """Worker processes of the engine."""
    seconds: float
    """`timeouts.transfer_seconds`."""
    rendezvous: dict[str, Any]
    """`asdict` of the run's `Rendezvous`."""

    @classmethod
    def of(cls, config: RunConfig, engine: int, rendezvous: Rendezvous) -> dict[str, Any]:
        """Return the dict for the workers of an engine."""
        info = cls(
            transport=config.weights.transport,
            engine=engine,
            workers=config.roles.generator_tensor_parallel,
            seconds=config.timeouts.transfer_seconds,
            rendezvous=asdict(rendezvous),
        )
        return asdict(info)

    def worker(self, number: int) -> ReceivingWorker:
        """Return one of the engine's workers."""
        rendezvous = Rendezvous(**self.rendezvous)
        return ReceivingWorker(rendezvous, self.engine, number, self.workers, self.seconds)


def open_receiver(info: ReceiverInfo, worker: int) -> Receiver:
    """Return the receiver of worker `worker` of an engine.

    Raises:
        ValueError: a transport of another name; trainer and generator are of different versions.
    """
    match info.transport:
        case "disk":
            from megatron_rl.weights.transports.disk import DiskReceiver

            return DiskReceiver()
        case "gloo":
            from megatron_rl.weights.transports.gloo import GlooReceiver

            return GlooReceiver(info.worker(worker))
        case "nccl":
            from megatron_rl.weights.transports.nccl import NcclReceiver

            return NcclReceiver(info.worker(worker))
    raise ValueError(f"weights.transport {info.transport!r} is not one of disk, gloo, nccl")


def check_manifest(config: RunConfig, manifest: Manifest) -> None:
    """Run the checks that need no worker.

    Raises:
        WeightsError: a version of another transport, or files that are missing or torn.
    """
    from megatron_rl.weights.manifest import WeightsError
    from megatron_rl.weights.transports.disk import check_buckets

    if manifest.transport != config.weights.transport:
        raise WeightsError(
            f"weights version {manifest.version} came by {manifest.transport!r}, and this"
            f" generator has weights.transport {config.weights.transport!r}: give every role one"
            " configuration"
        )
    if manifest.transport == "disk":
        check_buckets(manifest)
