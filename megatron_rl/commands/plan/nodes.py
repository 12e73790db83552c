"""The nodes of a run: which ranks they have, and which of them keep a store of whole versions."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from megatron_rl.config import RunConfig


@dataclass(frozen=True, slots=True)
class Nodes:
    """Ranks by node, trainers first."""

    trainers: int
    """Trainer ranks."""
    ranks: tuple[tuple[int, ...], ...]
    """Of each node; the last one may have fewer."""
    shared_files: bool
    """Versions are in `weights.directory`."""

    @property
    def trainer_nodes(self) -> list[int]:
        """Nodes with trainer ranks."""
        return [node for node, ranks in enumerate(self.ranks) if ranks[0] < self.trainers]

    @property
    def generator_nodes(self) -> list[int]:
        """Nodes with generator ranks."""
        return [node for node, ranks in enumerate(self.ranks) if ranks[-1] >= self.trainers]

    @property
    def stores(self) -> list[int]:
        """Nodes that take versions: those whose engines cannot read the stores of all trainers."""
        if self.shared_files:
            return []
        return [node for node in self.generator_nodes if self.trainer_nodes != [node]]

    @property
    def depth(self) -> int:
        """Levels of the tree: two stores take from the trainers, two from each store."""
        return math.ceil(math.log2(len(self.stores) / 2 + 1))


def nodes_of(run: RunConfig) -> Nodes:
    """Return the nodes of a run of `roles.gpus_per_node` ranks each."""
    ranks = range(run.roles.world_size)
    size = len(ranks) if run.roles.one_gpu else run.roles.gpus_per_node
    by_node = tuple(itertools.batched(ranks, size))
    return Nodes(run.roles.trainer_ranks, by_node, run.weights.directory is not None)
