"""Memory of a node's host without the page cache: versions, saving, processes (docs/memory.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_rl.commands.plan import tensors
from megatron_rl.commands.plan.nodes import nodes_name, nodes_of
from megatron_rl.commands.plan.update_memory import share_bytes
from megatron_rl.config import RunConfig
from megatron_rl.weights.pull import READS
from megatron_rl.weights.store import VERSIONS_HELD

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

GIB = 2**30
RANK_BYTES = 6 * GIB  # estimate of a rank's processes: torch, CUDA, NCCL; vLLM's server, engine
SYSTEM_BYTES = 8 * GIB  # estimate of the operating system of a node
ORCHESTRATOR_BYTES = 8 * GIB  # estimate, with verifiers, prompts and completions in flight
SAVED_FILE_BYTES = 4 * GIB  # largest file of the final model, unless one tensor is larger


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
    largest = max(n for s in stages for _, n in tensors.rank_tensors(a, run.parallel, s))
    copied = 4 * largest  # of the fp32 optimizer states
    bucket, total = tensors.saved_bucket_bytes(run, a), tensors.update_bytes(run, a)
    nodes, trainers = nodes_of(run), run.roles.trainer_ranks
    shares = [share_bytes(run, a, stage) for stage in stages]
    reads = READS * tensors.bucket_bytes(run, [unit.sent for unit in tensors.all_units(run, a)])
    hosts: list[HostMemory] = []
    for node, ranks in enumerate(nodes.ranks):
        own, versions = [rank for rank in ranks if rank < trainers], 0.0
        if run.weights.directory is None:
            versions = sum(VERSIONS_HELD * shares[r * len(shares) // trainers] for r in own)
        versions += VERSIONS_HELD * total * (node in nodes.stores)
        buffers = reads if node in nodes.stores else 0
        saving, processes = copied * len(own), SYSTEM_BYTES + RANK_BYTES * len(ranks)
        if node == 0:
            file = max(min(SAVED_FILE_BYTES, total), bucket)
            saving, processes = max(saving, file + 4 * bucket), processes + ORCHESTRATOR_BYTES
        host = HostMemory(node, node, versions + buffers, versions, saving, processes)
        if hosts and replace(hosts[-1], node=node, last_node=node) == host:
            hosts[-1] = replace(hosts[-1], last_node=node)
        else:
            hosts.append(host)
    return hosts
