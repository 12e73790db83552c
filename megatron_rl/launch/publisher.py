"""This trainer rank's end of the weight transport, for the time of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron_rl.orchestrator.client import TrainerClient
from megatron_rl.trainer.loop import Publish

from megatron_rl.config import RunConfig
from megatron_rl.messages import Manifest
from megatron_rl.weights.rendezvous import Rendezvous
from megatron_rl.weights.transports import open_publisher
from megatron_rl.weights.transports.base import WeightStream


@contextlib.contextmanager
def open_publish(
    config: RunConfig, rank: int, rendezvous: Rendezvous, client: TrainerClient | None
) -> Iterator[Publish | None]:
    """Publish weight versions by the run's transport; None on a rank that takes no part."""
    publisher = open_publisher(config, rank, rendezvous)
    if publisher is None:
        yield None
        return

    def publish(version: int, stream: WeightStream) -> Manifest | None:
        manifest = publisher.publish(version, stream, config.weights.bucket_bytes)
        if client is not None:  # rank 0, which hears what nobody reads any more
            publisher.release(client.versions_needed_from - 1)
        return manifest

    try:
        yield publish
    finally:
        publisher.close()
