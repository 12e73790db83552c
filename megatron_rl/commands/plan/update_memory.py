"""Bytes and seconds of a new version of the weights on its way to the generators (docs/memory.md).

The rates are assumptions about a node; nothing here was measured on GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.commands.plan import tensors
from megatron_rl.commands.plan.nodes import Nodes, nodes_of
from megatron_rl.config import RunConfig
from megatron_rl.weights.pull import READS
from megatron_rl.weights.store import LARGEST_DIFFERENCE

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

LINK = 44.0e9
"""Bytes per second of a node's network: one interface of 400 Gb/s, and of its peak what prime-rl
publishes for one-sided reads. Nodes with an interface per GPU can have more."""
SHARED_FILES = 5.0e9  # estimate: bytes per second of a file system that all nodes read at once
HOST_LINKS = {"PCIe 5 x16": 50.0e9, "NVLink-C2C": 200.0e9}
"""Bytes per second between host and GPU, page-locked, each way: peaks are 64 and 450 (GB200)."""
CHECKSUM = 30.0e9  # bytes per second of xxh3-128 on one core; measured on an EPYC
COPY = 13.0e9  # bytes per second of a copy within the host by one core; measured on an EPYC
CHANGED_SHARE = 0.003  # of bf16 values, by an AdamW step at 5e-7; measured: 0.25 to 0.33%


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """Bytes and seconds of a version; `by_link` are for each of `HOST_LINKS`."""

    num_bytes: int
    difference_bytes: int  # as differences to the version before
    stores: int  # nodes that take it over the network
    depth: int  # of their tree
    copy_by_link: dict[str, float]  # in which the trainer waits
    complete: float  # until the trainer has all differences and checksums, while it trains
    travel_whole: float
    """From complete at the trainer to complete on the last node; the first version and a newcomer's
    travel so."""
    travel_differences: float
    check: float  # of the checksums by an engine, while it decodes; 0 if a store has done it
    pause_by_link: dict[str, float]  # in which an engine does not decode


def share_bytes(run: RunConfig, architecture: Architecture, stage: int) -> float:
    """Return the bytes of a version in the store of a trainer rank.

    A stage's buckets are spread over all its ranks, replicas included (`trainer.export`).
    """
    ranks = run.roles.trainer_ranks // run.parallel.pipeline
    return sum(unit.sent for unit in tensors.sent_units(run, architecture, stage)) / ranks


def update_time(
    run: RunConfig, architecture: Architecture, changed_share: float = CHANGED_SHARE
) -> UpdateTime:
    """Return the time of an update that changes this share of the 16-bit words."""
    from megatron_rl.weights.loading import CHECKS

    num_bytes, nodes = tensors.update_bytes(run, architecture), nodes_of(run)
    share = max(share_bytes(run, architecture, s) for s in range(run.parallel.pipeline))
    # The lower half of an fp32 value changes in every step.
    fraction = 2 * (1.0 if run.generator_dtype == "fp32" else changed_share)
    changed = int(num_bytes * fraction) if fraction <= LARGEST_DIFFERENCE else num_bytes
    bucket = tensors.bucket_bytes(run, [u.sent for u in tensors.all_units(run, architecture)])
    work = num_bytes * (1 / COPY + 1 / CHECKSUM) / READS
    if run.weights.directory is not None:
        whole = differences = len(nodes.generator_nodes) * num_bytes / SHARED_FILES
        changed = num_bytes
    elif nodes.stores:
        whole = max(_travel(num_bytes, bucket, nodes), work)
        differences = max(_travel(changed, bucket * changed / num_bytes, nodes), work)
    else:
        whole = differences = 0.0
    kept = num_bytes / run.roles.generator_tensor_parallel
    slowest = min(HOST_LINKS.values())
    return UpdateTime(
        num_bytes=num_bytes,
        difference_bytes=changed,
        stores=len(nodes.stores),
        depth=nodes.depth,
        copy_by_link={name: share / rate for name, rate in HOST_LINKS.items()},
        complete=share * (2 / slowest + 1 / CHECKSUM),
        travel_whole=whole,
        travel_differences=differences,
        check=0.0 if nodes.stores else num_bytes / CHECKSUM / CHECKS,
        pause_by_link={name: kept / rate for name, rate in HOST_LINKS.items()},
    )


def _travel(num_bytes: float, bucket: float, nodes: Nodes) -> float:
    """Return the seconds until the last store has all buckets, by the network alone."""
    trainers, stores = len(nodes.trainer_nodes), len(nodes.stores)
    # What the fullest link carries: own bytes, those of two children, the publisher's two copies.
    copies = max(1.0, min(stores, 2) / trainers, min(max(stores - 2, 0), 2))
    return copies * (num_bytes + nodes.depth * bucket) / LINK
