"""The layouts of a number of ranks that divide the model and fit, best first.

Trainers and generators: ScaleRL used one trainer rank to four generator ranks, so the trainer
count that fits and is nearest to a fifth of the ranks is best. Among its layouts the order is that
of what costs throughput: recomputation first (`full` costs a third of the compute again), then
pipeline stages (a bubble each), tensor-parallel ranks (two all-reduces per layer each way), expert
tensor and expert parallel ranks. Engines are as narrow as still holds `ENOUGH_SEQUENCES`. It is a
rule of thumb and no measurement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.commands.plan.generator_memory import (
    Assumptions,
    GeneratorMemory,
    generator_memory,
    generator_misfits,
)
from megatron_rl.commands.plan.layout import Layout, Recompute, division_problems, node_problems
from megatron_rl.commands.plan.memory import Memory, estimate, trainer_memory, trainer_misfits
from megatron_rl.config import RunConfig
from megatron_rl.models.division import problems

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

TRAINER_SHARE = 0.2
ENOUGH_SEQUENCES = 8
"""Completions of full length that an engine's cache should hold: most are shorter."""
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Found:
    """A layout with its memory."""

    layout: Layout
    memory: Memory


@dataclass(frozen=True, slots=True)
class Search:
    """What was found, and the nearest miss where nothing was."""

    found: tuple[Found, ...]
    """Best first."""
    tried: int
    """Layouts of the trainers that divide the model."""
    nearest: Found | None
    """The one that needs the least memory, where none fits."""


def search(
    run: RunConfig,
    architecture: Architecture,
    world: int,
    gpus_per_node: int,
    assumed: Assumptions,
    most: int = 5,
) -> Search:
    """Layouts of `world` ranks.

    Args:
        run: everything but the layout; its context-parallel size is kept.
        architecture: the model.
        world: ranks of trainers and generators together.
        gpus_per_node: tensor parallelism stays inside of a node.
        assumed: the device.
        most: how many to return.
    """
    nearest: Layout | None = None
    least, tried = math.inf, 0
    for trainers in _by_preference(world):
        width, generator = _engine(run, architecture, world - trainers, gpus_per_node, assumed)
        fit = []
        for layout in _layouts(run, architecture, trainers, world - trainers, gpus_per_node):
            if problems(layout, architecture):
                continue
            tried += 1
            stages = trainer_memory(run, layout, architecture)
            need = max(stage.total for stage in stages)
            whole = layout.with_(generator_tensor=width)
            if not trainer_misfits(stages, assumed) and not generator_misfits(generator):
                fit.append(whole)
            elif need < least:
                nearest, least = whole, need
        # The configuration has the last word on sizes.
        fit = [
            x
            for x in fit
            if not division_problems(run, x, architecture) and not node_problems(x, gpus_per_node)
        ]
        if fit:
            best = sorted(fit, key=_cost)[:most]
            found = tuple(Found(x, estimate(run, x, architecture, assumed)) for x in best)
            return Search(found, tried, None)
    if nearest is None:
        return Search((), tried, None)
    return Search((), tried, Found(nearest, estimate(run, nearest, architecture, assumed)))


def _cost(x: Layout) -> tuple[int, ...]:
    """What costs throughput, dearest first."""
    return RECOMPUTE.index(x.recompute), x.pipeline, x.tensor, x.expert_tensor, x.expert


def _engine(
    run: RunConfig, architecture: Architecture, ranks: int, node: int, assumed: Assumptions
) -> tuple[int, GeneratorMemory]:
    """Ranks of an engine: the narrowest with enough cache, else the one with the most."""
    engines = [
        (width, generator_memory(run, width, architecture, assumed))
        for width in _powers(node)
        if ranks % width == 0 and architecture.heads % width == 0
    ]
    for width, memory in engines:
        if memory.sequences >= ENOUGH_SEQUENCES:
            return width, memory
    return max(engines, key=lambda engine: engine[1].sequences)


def _by_preference(world: int) -> Iterator[int]:
    """Trainer counts, nearest to their share first; more before fewer."""
    wanted = world * TRAINER_SHARE
    counts = [n for n in range(1, world) if _smooth(n)]
    yield from sorted(counts, key=lambda n: (abs(math.log(n / wanted)), -n))


def _smooth(n: int) -> bool:
    """No prime factors but 2, 3 and 5: others divide no model."""
    for p in (2, 3, 5):
        while n % p == 0:
            n //= p
    return n == 1


def _layouts(
    run: RunConfig, architecture: Architecture, trainers: int, generators: int, node: int
) -> Iterator[Layout]:
    a, context = architecture, run.parallel.context
    tensors = [t for t in _powers(min(node, trainers)) if a.groups % t == 0]
    stages = [p for p in _divisors(trainers) if p <= a.layers]
    experts = [e for e in _divisors(a.experts) if e <= trainers] if a.experts else [1]
    for tensor, pipeline, expert in itertools.product(tensors, stages, experts):
        if trainers % (tensor * pipeline * context):
            continue
        inner = sorted({1, tensor}) if a.experts else [1]
        for expert_tensor, recompute in itertools.product(inner, RECOMPUTE):
            if trainers % (expert * expert_tensor * pipeline) == 0:
                yield Layout(
                    trainers,
                    generators,
                    tensor,
                    pipeline,
                    context=context,
                    expert=expert,
                    expert_tensor=expert_tensor,
                    sequence_parallel=tensor > 1,
                    recompute=recompute,
                )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
