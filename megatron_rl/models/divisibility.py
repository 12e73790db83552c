"""Divisibility of a model by parallel sizes, and the layers of a pipeline stage. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.config import Parallel
    from megatron_rl.models.base import Architecture


def divisibility_errors(p: Parallel, a: Architecture) -> list[str]:
    """Return an error for each size that does not divide the model: key, value, count, remedy."""
    errors = [
        f"{key} is {size}: it does not divide the model's {count} {name}; choose a size that does"
        for key, size, name, count in (
            ("parallel.tensor", p.tensor, "key-value heads", a.groups),
            ("parallel.tensor", p.tensor, "attention heads", a.heads),
            ("parallel.expert", p.expert, "experts", a.experts),
            ("parallel.expert_tensor", p.expert_tensor, "rows in an expert", a.expert_feed_forward),
        )
        if count % size
    ]
    if a.experts and p.tensor > 1 and not p.sequence_parallel:
        errors.append(
            f"parallel.tensor is {p.tensor}: a mixture of experts needs"
            " parallel.sequence_parallel = true with it"
        )
    try:
        first_stage_layers(a.layers, p.pipeline, p.virtual_pipeline)
    except ValueError as e:
        errors.append(str(e))
    return errors


def first_stage_layers(layers: int, stages: int, chunks: int) -> int | None:
    """Return the layers of the first stage if it has more than the others, else None.

    The last stage also has the head, so the first one takes the remainder. ValueError: no even
    split over the stages after the first, or over the chunks of a stage.
    """
    if layers % (stages * chunks) == 0:
        return None
    if chunks > 1:
        raise ValueError(
            f"parallel.virtual_pipeline is {chunks}: {layers} layers are not divisible by"
            f" parallel.pipeline x parallel.virtual_pipeline = {stages * chunks}; choose another"
            " size, or 1"
        )
    first = -(-layers // stages)
    if layers < stages or (layers - first) % (stages - 1):
        raise ValueError(
            f"parallel.pipeline is {stages}: {layers} layers cannot be divided into a first stage"
            f" of {first} and {stages - 1} equal ones; choose another size"
        )
    return first


def layers_of_stage(layers: int, stages: int, chunks: int, stage: int) -> list[int]:
    """Return the global numbers of a stage's layers in Megatron's order.

    Example: 8 layers on 2 stages of 2 chunks: stage 0 has [0, 1, 4, 5].
    """
    first = first_stage_layers(layers, stages, chunks)
    if first is not None:
        rest = (layers - first) // (stages - 1)
        end = first + stage * rest
        return list(range(end - rest if stage else 0, end))
    own = layers // (stages * chunks)
    starts = [(chunk * stages + stage) * own for chunk in range(chunks)]
    return [layer for start in starts for layer in range(start, start + own)]
