"""Parameters of each trainer rank, from the same name mapping that loads and exports them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.commands.plan.layout import Layout
from megatron_rl.models.division import layers_of_stage

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture
    from megatron_rl.models.mapping import Weight


@dataclass(frozen=True, slots=True)
class Count:
    """Elements of the parameters of one rank."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.expert

    def __add__(self, other: Count) -> Count:
        return Count(self.dense + other.dense, self.expert + other.expert)


def count_stages(architecture: Architecture, layout: Layout) -> list[Count]:
    """Parameters of a rank of each pipeline stage; all ranks of a stage have as many.

    The vocabulary's padding counts, as it is there. Divisibility is `layout.division_problems`'.
    """
    sizes = (layout.tensor, layout.expert, layout.expert_tensor)
    first, layers, last = _by_layer(architecture, *sizes)
    stages = []
    for stage in range(layout.pipeline):
        count = Count(0, 0)
        for layer in layers_of_stage(
            architecture.layers, layout.pipeline, layout.virtual_pipeline, stage
        ):
            count += layers[layer]
        if stage == 0:
            count += first
        if stage == layout.pipeline - 1:
            # Tied embeddings: one tensor where first and last stage are the same.
            count += last[architecture.tied and layout.pipeline == 1]
        stages.append(count)
    return stages


@functools.lru_cache(maxsize=256)
def _by_layer(
    architecture: Architecture, tensor: int, expert: int, expert_tensor: int
) -> tuple[Count, list[Count], dict[bool, Count]]:
    """Embedding, layers, and what comes after them with and without a head of its own."""
    first, after, head = Count(0, 0), Count(0, 0), Count(0, 0)
    layers = [Count(0, 0)] * architecture.layers
    here = architecture.experts // expert if architecture.experts else 0
    for weight in architecture.weights():
        if weight.expert is not None and weight.expert >= here:
            continue
        count = _elements(weight, tensor if weight.expert is None else expert_tensor)
        if weight.layer is not None:
            layers[weight.layer] += count
        elif weight.megatron.startswith("embedding."):
            first += count
        elif weight.megatron.startswith("output_layer."):
            head += count
        else:
            after += count
    return first, layers, {False: after + head, True: after}


def _elements(weight: Weight, size: int) -> Count:
    elements = math.prod(_shard_shape(weight.shape, weight.split, size, weight))
    return Count(elements, 0) if weight.expert is None else Count(0, elements)


_SHAPES: dict[tuple[object, ...], tuple[int, ...]] = {}


def _shard_shape(
    shape: tuple[int, ...], split: object, size: int, weight: Weight
) -> tuple[int, ...]:
    """`Weight.shard_shape`, asked once for weights that are alike."""
    key = (shape, split, size)
    if key not in _SHAPES:
        _SHAPES[key] = weight.shard_shape(size)
    return _SHAPES[key]
