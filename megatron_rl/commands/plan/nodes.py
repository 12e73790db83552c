"""The nodes of a run: which ranks they have, and which of them keep a store of whole versions."""

import itertools
import math
from dataclasses import dataclass

from megatron_rl.config import RunConfig


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
