"""Tensors of a model in a layout: those of a trainer rank, and those that travel as an update.

The sizes of the layout must divide the model (`models.divisibility`).
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config import ConfigError, Parallel, RunConfig
from megatron_rl.models.divisibility import layers_of_stage

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture
    from megatron_rl.models.mapping import Weight
    from megatron_rl.weights.number_format import WireFormat

Part = int | str
"""A layer, or a module outside the layers: `embedding`, `decoder` (its norm), `output_layer`."""


@dataclass(frozen=True, slots=True)
class SentUnit:
    """Tensors that a rank joins at once: those of one parameter."""

    routed: bool  # of a routed expert
    fused: bool  # one of the experts of a tensor of the checkpoint
    joined: int  # bytes in the number format in which they are joined
    sent: int  # bytes as they travel


def read_architecture(run: RunConfig) -> Architecture:
    """Return the architecture of a run's model, from its directory or its name.

    Raises:
        ConfigError: no config.json, an unsupported one, or no torch.
    """
    try:
        from megatron_rl.models import architecture
    except ModuleNotFoundError as e:
        text = f"counting the parameters of a model needs {e.name}: pip install 'megatron_rl[cpu]'"
        raise ConfigError(text) from None
    config = run.model_config_json()
    try:
        return architecture(config)
    except ValueError as e:
        raise ConfigError(f"model {run.model}: {e}") from None


def count_stages(architecture: Architecture, p: Parallel) -> list[Counter[str]]:
    """Count `dense` and `expert` parameters of any rank of each stage, padding included."""
    by_part = _counts_by_part(architecture, p.tensor, p.expert, p.expert_tensor)
    stages = (stage_parts(architecture, p, stage) for stage in range(p.pipeline))
    return [sum((by_part[part] for part in parts), Counter()) for parts in stages]


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


def sent_units(
    run: RunConfig, architecture: Architecture, stage: int | None = None
) -> list[SentUnit]:
    """Return what the ranks (of a stage) join and keep, together, of a version of the weights."""
    by_part = _units_by_part(run, architecture)
    parts = by_part if stage is None else stage_parts(architecture, run.parallel, stage)
    return [unit for part in parts for unit in by_part[part]]


def update_bytes(run: RunConfig, architecture: Architecture) -> int:
    """Return the bytes of a version of the weights."""
    return sum(unit.sent for unit in sent_units(run, architecture))


def bucket_bytes(run: RunConfig, sizes: list[int]) -> int:
    """Return the bytes of the largest bucket that units of these sizes fill."""
    return min(sum(sizes), max(run.weights.bucket_bytes, *sizes)) if sizes else 0


def saved_bucket_bytes(run: RunConfig, architecture: Architecture) -> int:
    """Return the bytes of the largest bucket of a Hugging Face model, with its fused tensors."""
    parts = _units_by_part(run, architecture).values()
    # Of a layer's two tensors of all experts, that of gate and up is the larger one.
    largest = max(max((u.joined for u in units if u.fused), default=0) for units in parts)
    fused = largest * (architecture.experts or 0)
    return bucket_bytes(run, [fused, *(u.joined for units in parts for u in units)])


def largest_module(run: RunConfig, architecture: Architecture) -> int:
    """Return the bytes of the generators' largest module: a layer's experts or a table."""
    parts = _units_by_part(run, architecture).values()
    routed = (sum(unit.sent for unit in units if unit.routed) for units in parts)
    return max(*routed, *(unit.sent for units in parts for unit in units))


def _part(weight: Weight) -> Part:
    return weight.megatron.partition(".")[0] if weight.layer is None else weight.layer


@functools.lru_cache(maxsize=256)
def _counts_by_part(
    architecture: Architecture, tensor: int, expert: int, expert_tensor: int
) -> dict[Part, Counter[str]]:
    counts: dict[Part, Counter[str]] = defaultdict(Counter)
    for weight in architecture.weights():
        kind, size = ("dense", tensor) if weight.expert is None else ("expert", expert_tensor)
        if weight.expert is None or weight.expert < architecture.experts // expert:
            counts[_part(weight)][kind] += math.prod(weight.shard_shape(size))
    return counts


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
        experts = 1 if weight.index is None else architecture.experts
        expected = wire.expected({name: shapes[name] for name in weight.hf})
        sent = sum(map(tensor_bytes, expected.values())) // experts
        joined = weight.elements * wire.dtype.itemsize
        unit = SentUnit(weight.expert is not None, weight.index is not None, joined, sent)
        units[_part(weight)] += [unit] * experts
    return units
