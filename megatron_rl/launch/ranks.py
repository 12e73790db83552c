"""How many ranks a command starts itself anew with, where torchrun gave it one per node or none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.config import ConfigError


@dataclass(frozen=True, slots=True)
class Start:
    """A torchrun to be started on this node."""

    nodes: int
    per_node: int
    node: int = 0
    """Number of this node."""
    master: tuple[str, int] | None = None
    """Address and port of node 0; None: this node is alone."""

    def options(self) -> list[str]:
        """For the command line of torchrun."""
        ranks = [f"--nproc-per-node={self.per_node}"]
        if self.master is None:
            return ["--standalone", *ranks]
        address, port = self.master
        where = [f"--master-addr={address}", f"--master-port={port}"]
        return [f"--nnodes={self.nodes}", f"--node-rank={self.node}", *where, *ranks]


def gpu_count() -> int:
    """GPUs of this node that are visible."""
    import torch

    return int(torch.cuda.device_count())


def start_anew(
    needed: int,
    config: str,
    gpus_per_node: int,
    environment: Mapping[str, str] = os.environ,
    gpus: int | None = None,
) -> Start | None:
    """The torchrun that has the ranks which a configuration needs; None: they are there.

    A node without GPUs, alone, starts all of them, up to what a node may have. A node with GPUs
    starts one rank per GPU.

    Args:
        needed: ranks.
        config: names the configuration in a message.
        gpus_per_node: ranks that one node without GPUs starts at most.
        environment: of this process.
        gpus: of this node; None: counted when that matters.

    Raises:
        ConfigError: all GPUs of all nodes are too few; says how many nodes it takes.
    """
    world = int(environment.get("WORLD_SIZE", "1"))
    local = int(environment.get("LOCAL_WORLD_SIZE", world if world == 1 else 0))
    under_torchrun = "RANK" in environment
    if under_torchrun and (local != 1 or world == needed):
        return None
    nodes = world if under_torchrun else 1
    if gpus is None:
        gpus = gpu_count()
    if not gpus and nodes > 1:
        return None
    if not gpus and needed > gpus_per_node:
        raise ConfigError(
            f"{config} needs {needed} ranks, and this node has no GPU: without GPUs a node starts"
            f" {gpus_per_node} at most (roles.gpus_per_node); use --dry-run to look at the run"
        )
    if not gpus:
        return Start(1, needed)
    per_node = min(gpus, -(-needed // nodes))
    if per_node * nodes != needed:
        wide = -(-needed // gpus)
        raise ConfigError(
            f"{config} needs {needed} ranks, one GPU each, and {nodes} node(s) of {gpus} GPU(s)"
            f" have {gpus * nodes}: start it on {wide} node(s) with torchrun --nnodes {wide}"
            f" --nproc-per-node {needed // wide}, ask `megatron-rl plan` for a layout of another"
            " size (--world), or hide the GPUs to run on CPU (CUDA_VISIBLE_DEVICES=)"
        )
    if nodes == 1:
        return Start(1, per_node)
    # The port of the torchrun that started this process is taken while it lives.
    master = (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]) + 1)
    return Start(nodes, per_node, int(environment["GROUP_RANK"]), master)
