"""Memory of a node's host, without the page cache.

- Versions of the weights. A sender of `nccl` and `gloo` holds the two newest and the one that it
  fills; `disk` keeps as many in shared memory if it has no directory. By `gloo`, each generator
  rank also receives a whole version.
- Saving. A checkpoint copies one tensor at a time on every rank; the Hugging Face model at the end
  passes through rank 0, bucket by bucket, into a file.
- Processes, as estimates.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.commands.plan.tensors import rank_tensors, sent_bytes, sent_units, update_bytes
from megatron_rl.commands.plan.update_memory import bucket_bytes, own_expert_bytes
from megatron_rl.config import RunConfig

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

GIB = 2**30
VERSIONS = 3
"""Versions of the weights while a new one is filled; a generator that lags can hold more."""
RANK_BYTES = 6 * GIB
"""Estimate of the processes of a rank: torch, CUDA, NCCL; vLLM's server and engine."""
SYSTEM_BYTES = 8 * GIB
"""Estimate of the operating system of a node."""
ORCHESTRATOR_BYTES = 8 * GIB
"""Estimate of the orchestrator with its verifiers, prompts and completions in flight."""
SAVED_FILE_BYTES = 4 * GIB
"""Largest file of the final Hugging Face model, unless one tensor is larger."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of a node's host."""

    node: int
    versions: float
    saving: float
    processes: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.versions + self.saving + self.processes


def ranks_by_node(run: RunConfig) -> list[tuple[int, ...]]:
    """Return the ranks of each node; the last one may have fewer."""
    ranks = range(run.roles.world_size)
    return [*itertools.batched(ranks, len(ranks) if run.roles.one_gpu else run.roles.gpus_per_node)]


def fullest_host(run: RunConfig, architecture: Architecture) -> HostMemory:
    """Return the memory of the node that needs the most."""
    senders = held_by_senders(run, architecture)
    stages = range(run.parallel.pipeline)
    largest = max(n for s in stages for _, n in rank_tensors(architecture, run.parallel, s))
    copied = 4 * largest  # of the fp32 optimizer states
    bucket = max(bucket_bytes(run, sent_units(run, architecture, stage)) for stage in stages)
    total = update_bytes(run, architecture)
    received = total if run.weights.transport == "gloo" else 0

    def host(node: int, ranks: tuple[int, ...]) -> HostMemory:
        trainers = sum(rank < run.roles.trainer_ranks for rank in ranks)
        saving, processes = copied * trainers, SYSTEM_BYTES + RANK_BYTES * len(ranks)
        if node == 0:
            file = max(min(SAVED_FILE_BYTES, total), bucket)
            saving = max(saving, file + 4 * bucket)
            processes += ORCHESTRATOR_BYTES
        versions = sum(senders.get(rank, 0) for rank in ranks)
        versions += (len(ranks) - trainers) * received
        return HostMemory(node, versions, saving, processes)

    hosts = itertools.starmap(host, enumerate(ranks_by_node(run)))
    return max(hosts, key=lambda memory: memory.total)


def held_by_senders(run: RunConfig, architecture: Architecture) -> dict[int, int]:
    """Return the bytes of the versions that each sending rank holds."""
    p, trainers = run.parallel, run.roles.trainer_ranks
    if run.weights.directory is not None:
        return {}
    held = {}
    for stage in range(p.pipeline):
        first, units = stage * (trainers // p.pipeline), sent_units(run, architecture, stage)
        if units:
            held[first] = VERSIONS * sent_bytes(units)
        # Experts with tensors of their own leave from the lowest rank that holds them.
        of_experts = own_expert_bytes(units)
        for group in range(1, p.expert if of_experts and run.weights.transport == "nccl" else 1):
            held[first + group * p.expert_tensor] = VERSIONS * of_experts
    return held
