"""Layouts of a run: the sizes in its sections `roles` and `parallel`.

The search returns those that divide the model and fit, best first, by the rule of thumb of
docs/memory.md. Engines are as narrow as possible with a cache for `ENOUGH_SEQUENCES`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megatron_rl.commands.plan.memory import RESERVE_GIB, LayoutMemory, estimate, generator_memory
from megatron_rl.config import Parallel, RunConfig
from megatron_rl.models.divisibility import divisibility_errors
from megatron_rl.recipes import flatten

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

ROLE_SIZES = ("trainer_ranks", "generator_ranks", "generator_tensor_parallel")
TRAINER_SHARE = 0.2
ENOUGH_SEQUENCES = 8  # completions of full length that fit an engine's cache; most are shorter
RECOMPUTE = ("none", "selective", "full")
MOST = 5  # number of layouts that a search returns


def with_layout(
    run: RunConfig,
    trainer_ranks: int,
    generator_ranks: int,
    generator_tensor_parallel: int = 1,
    **parallel: Any,
) -> RunConfig:
    """Return the run with other sizes, which are not checked; `parallel` starts at its defaults."""
    sizes = (trainer_ranks, generator_ranks, generator_tensor_parallel)
    roles = run.roles.model_copy(update=dict(zip(ROLE_SIZES, sizes, strict=True)))
    return run.model_copy(update={"roles": roles, "parallel": Parallel.model_construct(**parallel)})


def layout_values(run: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the sizes as sections of a configuration."""
    roles = run.roles.model_dump(include=set(ROLE_SIZES))
    return {"roles": roles, "parallel": run.parallel.model_dump()}


def layout_options(run: RunConfig) -> str:
    """Return the sizes as command-line options; `parallel` without its defaults."""
    values = layout_values(run) | {"parallel": run.parallel.model_dump(exclude_defaults=True)}
    return " ".join(f"--{key} {str(value).lower()}" for key, value in flatten(values))


def layout_problems(run: RunConfig, architecture: Architecture) -> list[str]:
    """Return the reasons why this model cannot run in this layout."""
    try:
        RunConfig.model_validate(run.model_dump())
    except ValidationError as e:
        return [str(error.get("ctx", {}).get("error", error["msg"])) for error in e.errors()]
    reasons = divisibility_errors(run.parallel, architecture)
    width, node = run.roles.generator_tensor_parallel, run.roles.gpus_per_node
    key = f"roles.generator_tensor_parallel is {width}"
    if architecture.heads % width:
        reasons.append(
            f"{key}: vLLM cannot divide the {architecture.heads} attention heads of the model; use"
            " a size that divides them"
        )
    if architecture.groups % width and width % architecture.groups:
        reasons.append(
            f"{key}: vLLM can neither divide nor replicate the {architecture.groups} key-value"
            " heads of the model"
        )
    if run.parallel.tensor > node:
        reasons.append(
            f"parallel.tensor is {run.parallel.tensor}: a node has {node} GPUs, and tensor-parallel"
            " ranks should share one; use parallel.pipeline beyond"
        )
    engines = range(run.roles.trainer_ranks, run.roles.world_size, width)
    if crossing := [first for first in engines if first % node + width > node]:
        reasons.append(
            f"{key}: the engine of ranks {crossing[0]}-{crossing[0] + width - 1} spans two nodes of"
            f" {node} GPUs; use a size that divides both roles.gpus_per_node and"
            " roles.trainer_ranks"
        )
    return reasons


def search(
    run: RunConfig, architecture: Architecture, world: int, reserve_gib: float = RESERVE_GIB
) -> list[LayoutMemory]:
    """Return layouts of `world` ranks that fit, best first.

    If none fits, return only the one that needs the least memory, with its misfits; an empty list
    if none divides the model. The context-parallel size of `run` is kept.
    """
    nearest: list[LayoutMemory] = []
    for trainers in _trainer_counts(world):
        engine = _engine_ranks(run, architecture, world - trainers)
        fitting = []
        for sizes in _parallel_sizes(run, architecture, trainers):
            candidate = with_layout(run, trainers, world - trainers, engine, **sizes)
            if divisibility_errors(candidate.parallel, architecture):
                continue
            memory = estimate(candidate, architecture, reserve_gib)
            if not memory.misfits:
                fitting.append(memory)
            elif not nearest or memory.worst.total < nearest[0].worst.total:
                nearest = [memory]
        fitting = [memory for memory in fitting if not layout_problems(memory.run, architecture)]
        if fitting:
            return sorted(fitting, key=_cost)[:MOST]
    return nearest


def _cost(memory: LayoutMemory) -> tuple[int, ...]:
    """Return the sizes that cost throughput, most expensive first."""
    p = memory.run.parallel
    return RECOMPUTE.index(p.recompute), p.pipeline, p.tensor, p.expert_tensor, p.expert


def _engine_ranks(run: RunConfig, architecture: Architecture, ranks: int) -> int:
    """Return the narrowest engine with enough cache, else the one with the largest."""
    sequences = {
        width: generator_memory(with_layout(run, 1, ranks, width), architecture).sequences
        for width in _powers(run.roles.gpus_per_node)
        if ranks % width == 0 and architecture.heads % width == 0
    }
    # The first of equal ones is the narrowest.
    return max(sequences, key=lambda width: min(sequences[width], ENOUGH_SEQUENCES))


def _trainer_counts(world: int) -> list[int]:
    """Return counts without prime factors above 5 (they divide no model), the best first."""
    counts = [n for n in range(1, world) if 30**20 % n == 0]
    return sorted(counts, key=lambda n: (abs(math.log(n / (world * TRAINER_SHARE))), -n))


def _parallel_sizes(
    run: RunConfig, architecture: Architecture, trainers: int
) -> Iterator[dict[str, Any]]:
    context, experts = run.parallel.context, architecture.experts
    for tensor, pipeline, expert in itertools.product(
        _powers(run.roles.gpus_per_node), _divisors(trainers), _divisors(experts or 1)
    ):
        dense = {"tensor": tensor, "pipeline": pipeline, "context": context}
        for expert_tensor in sorted({1, tensor if experts else 1}):
            sizes = {**dense, "expert": expert, "expert_tensor": expert_tensor}
            ranks = (tensor * context * pipeline, expert * expert_tensor * pipeline)
            if all(trainers % size == 0 for size in ranks):
                for recompute in RECOMPUTE:
                    yield {**sizes, "sequence_parallel": tensor > 1, "recompute": recompute}


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]
