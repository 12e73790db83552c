"""Tensors of a model in a layout: those of a trainer rank, and those that travel as an update.

All come from the name mapping that loads and exports the model. The sizes of the layout must divide
the model (`models.divisibility`).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config import Parallel, RunConfig
from megatron_rl.models.divisibility import layers_of_stage

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture
    from megatron_rl.models.mapping import Split, Weight
    from megatron_rl.weights.number_format import WireFormat

Part = int | str
"""A layer, or a module outside the layers: `embedding`, `decoder` (its norm), `output_layer`."""


@dataclass(frozen=True, slots=True)
class SentUnit:
    """Tensors that a sender joins at once: those of one parameter, or of all experts if fused."""

    expert: int | None
    """The expert that owns them; None if they are dense, or of all experts of the layer."""
    routed: bool
    """Of routed experts."""
    joined: int
    """Bytes in the number format in which they are joined."""
    sent: tuple[int, ...]
    """Bytes of each tensor as it travels."""


def count_stages(architecture: Architecture, parallel: Parallel) -> list[Counter[str]]:
    """Count `dense` and `expert` parameters of a rank of each stage, padded vocabulary included.

    All ranks of a stage have the same number.
    """
    stages: list[Counter[str]] = [Counter() for _ in range(parallel.pipeline)]
    for stage, count in enumerate(stages):
        for kind, elements in rank_tensors(architecture, parallel, stage):
            count[kind] += elements
    return stages


def rank_tensors(architecture: Architecture, p: Parallel, stage: int) -> list[tuple[str, int]]:
    """Return (`dense` or `expert`, elements) of each parameter of a rank of a stage."""
    by_part = _rank_tensors(architecture, p.tensor, p.expert, p.expert_tensor)
    return [tensor for part in stage_parts(architecture, p, stage) for tensor in by_part[part]]


def stage_parts(architecture: Architecture, p: Parallel, stage: int) -> list[Part]:
    """Return the parts of the model on a stage, in the order of the forward pass."""
    parts: list[Part] = ["embedding"] if stage == 0 else []
    parts += layers_of_stage(architecture.layers, p.pipeline, p.virtual_pipeline, stage)
    if stage == p.pipeline - 1:
        parts.append("decoder")
        # Tied embeddings are one tensor if the first stage is the last one, too.
        if not architecture.tied or p.pipeline > 1:
            parts.append("output_layer")
    return parts


def sent_units(run: RunConfig, architecture: Architecture, stage: int) -> list[SentUnit]:
    """Return what the first rank of a stage sends to the generators, in its order."""
    p, by_part = run.parallel, _units_by_part(run, architecture)
    if run.weights.transport != "nccl":  # rank 0 joins the whole model
        return [*itertools.chain(*by_part.values())] if stage == 0 else []
    own = (architecture.experts or 1) // p.expert
    units = (unit for part in stage_parts(architecture, p, stage) for unit in by_part[part])
    return [unit for unit in units if unit.expert is None or unit.expert < own]


def sent_bytes(units: Iterable[SentUnit]) -> int:
    """Return the bytes of these units as they travel."""
    return sum(sum(unit.sent) for unit in units)


def update_bytes(run: RunConfig, architecture: Architecture) -> int:
    """Return the bytes of a weight update, which every generator rank receives."""
    return sent_bytes(itertools.chain(*_units_by_part(run, architecture).values()))


def largest_module(run: RunConfig, architecture: Architecture) -> int:
    """Return the bytes of the generators' largest module: a layer's experts or a table."""
    parts = _units_by_part(run, architecture).values()
    routed = (sent_bytes(unit for unit in units if unit.routed) for units in parts)
    return max(*routed, *(sum(unit.sent) for units in parts for unit in units))


def _part(weight: Weight) -> Part:
    return weight.megatron.partition(".")[0] if weight.layer is None else weight.layer


@functools.lru_cache(maxsize=256)
def _rank_tensors(
    architecture: Architecture, tensor: int, expert: int, expert_tensor: int
) -> dict[Part, list[tuple[str, int]]]:
    tensors: dict[Part, list[tuple[str, int]]] = defaultdict(list)
    for weight in architecture.weights():
        kind, size = ("dense", tensor) if weight.expert is None else ("expert", expert_tensor)
        if weight.expert is None or weight.expert < architecture.experts // expert:
            elements = _elements(weight.shape, weight.split, size)
            tensors[_part(weight)].append((kind, elements))
    return tensors


@functools.cache
def _elements(shape: tuple[int, ...], split: Split, size: int) -> int:
    """Return the number of elements of one of `size` shards."""
    import torch

    return int(split.shard(torch.empty(shape, device="meta"), 0, size).numel())


def _units_by_part(run: RunConfig, architecture: Architecture) -> dict[Part, list[SentUnit]]:
    """Return the units of each part, both in the order of the export."""
    from megatron_rl.weights.number_format import WireFormat

    return _cached_units(architecture, WireFormat.of(run))


@functools.lru_cache(maxsize=16)
def _cached_units(architecture: Architecture, wire: WireFormat) -> dict[Part, list[SentUnit]]:
    from megatron_rl.weights.buckets import tensor_bytes

    shapes = architecture.shapes()
    units: dict[Part, list[SentUnit]] = defaultdict(list)
    for weight in architecture.weights():
        if not weight.exported or weight.index:  # experts after the first of a fused tensor
            continue
        fused = weight.index is not None
        expected = wire.expected({name: shapes[name] for name in weight.hf})
        sent = tuple(map(tensor_bytes, expected.values()))
        joined = weight.elements * wire.dtype.itemsize * (architecture.experts if fused else 1)
        expert = None if fused else weight.expert
        units[_part(weight)].append(SentUnit(expert, weight.expert is not None, joined, sent))
    return units
