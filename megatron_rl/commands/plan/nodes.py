"""The nodes of a run, the memory of their hosts, and the way of new weights between them.

The formulas are in docs/memory.md: of a host, without the page cache, the versions of the weights,
saving and processes; of a version on its way to the generators, bytes and seconds. The rates are
assumptions about a node; nothing here was measured on GPUs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_rl.commands.plan import tensors
from megatron_rl.config import RunConfig
from megatron_rl.weights.pull import READS
from megatron_rl.weights.store import LARGEST_DIFFERENCE, VERSIONS_HELD

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

GIB = 2**30
RANK_BYTES = 6 * GIB  # estimate of a rank's processes: torch, CUDA, NCCL; vLLM's server, engine
SYSTEM_BYTES = 8 * GIB  # estimate of the operating system of a node
ORCHESTRATOR_BYTES = 8 * GIB  # estimate, with verifiers, prompts and completions in flight
SAVED_FILE_BYTES = 4 * GIB  # largest file of the final model, unless one tensor is larger
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
class Nodes:
    """Ranks by node, trainers first."""

    ranks: list[tuple[int, ...]]  # of each node; the last one may have fewer
    trainer_nodes: list[int]  # nodes with trainer ranks
    generator_nodes: list[int]
    stores: list[int]  # take versions: their engines cannot read the stores of all trainers

    @property
    def depth(self) -> int:
        """Levels of the tree: two stores take from the trainers, two from each store."""
        return math.ceil(math.log2(len(self.stores) / 2 + 1))


def nodes_name(first: int, last: int) -> str:
    """Return `node 3` or `nodes 3-7`."""
    return f"node {first}" if first == last else f"nodes {first}-{last}"


def nodes_of(run: RunConfig) -> Nodes:
    """Return the nodes of a run of `roles.gpus_per_node` ranks each."""
    world, first = run.roles.world_size, run.roles.trainer_ranks
    size = world if run.roles.one_gpu else run.roles.gpus_per_node
    ranks = list(itertools.batched(range(world), size))
    trainers = [node for node, own in enumerate(ranks) if own[0] < first]
    generators = [node for node, own in enumerate(ranks) if own[-1] >= first]
    stores = [node for node in generators if trainers != [node] and run.weights.directory is None]
    return Nodes(ranks, trainers, generators, stores)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of a node's host."""

    node: int
    last_node: int  # last one of the nodes from `node` on that need the same
    versions: float
    shared: float  # of the versions, what is in shared memory: all but the buffers
    saving: float
    processes: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.versions + self.saving + self.processes

    @property
    def name(self) -> str:
        """`node 3` or `nodes 3-7`."""
        return nodes_name(self.node, self.last_node)


def host_memory(run: RunConfig, architecture: Architecture) -> list[HostMemory]:
    """Return the memory of each node's host, neighbors that need the same as one."""
    stages, a = range(run.parallel.pipeline), architecture
    bucket, total = tensors.saved_bucket_bytes(run, a), tensors.update_bytes(run, a)
    nodes, trainers = nodes_of(run), run.roles.trainer_ranks
    counts = tensors.count_stages(a, run.parallel)
    shares = [share_bytes(run, a, stage) for stage in stages]
    reads = READS * tensors.bucket_bytes(run, [unit.sent for unit in tensors.sent_units(run, a)])
    hosts: list[HostMemory] = []
    for node, ranks in enumerate(nodes.ranks):
        own, versions = [rank for rank in ranks if rank < trainers], 0.0
        if run.weights.directory is None:
            versions = sum(VERSIONS_HELD * shares[r * len(shares) // trainers] for r in own)
        versions += VERSIONS_HELD * total * (node in nodes.stores)
        buffers = reads if node in nodes.stores else 0
        saving = sum(checkpoint_bytes(run, counts, rank) for rank in own)
        processes = SYSTEM_BYTES + RANK_BYTES * len(ranks)
        if node == 0:
            file = max(min(SAVED_FILE_BYTES, total), bucket)
            saving, processes = saving + file + 4 * bucket, processes + ORCHESTRATOR_BYTES
        host = HostMemory(node, node, versions + buffers, versions, saving, processes)
        if hosts and replace(hosts[-1], node=node, last_node=node) == host:
            hosts[-1] = replace(hosts[-1], last_node=node)
        else:
            hosts.append(host)
    return hosts


def checkpoint_bytes(run: RunConfig, counts: list[Counter[str]], rank: int) -> float:
    """Return the bytes of a checkpoint that a trainer rank writes, and keeps on its host.

    Of the ranks with the same parameters (`tensors.count_stages`), the first one writes these.
    """
    p, bf16 = run.parallel, run.precision.params == "bf16"
    ranks = run.roles.trainer_ranks // p.pipeline
    stage, place = divmod(rank, ranks)
    sharded = p.distributed_optimizer and ranks > p.tensor
    # Two moments, and a fp32 value where the optimizer has it apart from the parameter.
    width, states, total = 2 if bf16 else 4, 12 if bf16 or sharded else 8, 0.0
    for kind, others in (("dense", p.tensor), ("expert", p.expert * p.expert_tensor)):
        first = place < others
        owned = others / ranks if sharded else first
        total += counts[stage][kind] * (width * first + states * owned)
    return total


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """Bytes and seconds of a version; `by_link` are for each of `HOST_LINKS`."""

    num_bytes: int
    difference_bytes: int  # as differences to the version before
    stores: int  # nodes that take it over the network
    depth: int  # of their tree
    copy_by_link: dict[str, float]  # in which the trainer waits
    complete: float  # until the trainer has all differences and checksums, while it trains
    travel_whole: float  # to the last node; the first version and a newcomer's travel so
    travel_differences: float
    check: float  # of the checksums by an engine, while it decodes; 0 if a store has done it
    pause_by_link: dict[str, float]  # in which an engine does not decode


def share_bytes(run: RunConfig, architecture: Architecture, stage: int) -> float:
    """Return the bytes of a version in the store of a trainer rank (`trainer.export`)."""
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
    bucket = tensors.bucket_bytes(run, [u.sent for u in tensors.sent_units(run, architecture)])
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
