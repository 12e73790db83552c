"""Which parallel sizes divide a model, and which layers a pipeline stage has. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture


class Sizes(Protocol):
    """The section `parallel` of a configuration."""

    @property
    def tensor(self) -> int: ...
    @property
    def pipeline(self) -> int: ...
    @property
    def virtual_pipeline(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def expert_tensor(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...


def problems(parallel: Sizes, a: Architecture) -> list[str]:
    """Why a model cannot be divided so: the key, its value, the model's count and the remedy."""
    p = parallel
    found = [
        f"{key} is {size}: the model has {count} {what}, which cannot be divided so;"
        " choose a size that divides them"
        for key, size, what, count in (
            ("parallel.tensor", p.tensor, "key-value heads", a.groups),
            ("parallel.tensor", p.tensor, "attention heads", a.heads),
            ("parallel.expert", p.expert, "experts", a.experts),
            ("parallel.expert_tensor", p.expert_tensor, "rows in an expert", a.expert_feed_forward),
        )
        if count % size
    ]
    if a.experts and p.tensor > 1 and not p.sequence_parallel:
        found.append(
            f"parallel.tensor is {p.tensor}: a mixture of experts trains with it only together"
            " with parallel.sequence_parallel = true"
        )
    try:
        first_stage_layers(a.layers, p.pipeline, p.virtual_pipeline)
    except ValueError as e:
        found.append(str(e))
    return found


def first_stage_layers(layers: int, stages: int, chunks: int) -> int | None:
    """Layers of the first stage where it has more than the others; None: all have the same.

    The last stage has the head as well, so the first one takes what does not divide.

    Raises:
        ValueError: layers that leave no even split for the stages after the first, or for the
            chunks of a stage.
    """
    if layers % (stages * chunks) == 0:
        return None
    if chunks > 1:
        raise ValueError(
            f"parallel.virtual_pipeline is {chunks}: {layers} layers cannot be divided by"
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
    """Global numbers of a stage's layers, as Megatron deals them out.

    Example: 8 layers on 2 stages of 2 chunks: stage 0 has [0, 1, 4, 5].
    """
    first = first_stage_layers(layers, stages, chunks)
    if first is not None:
        rest = (layers - first) // (stages - 1)
        begin = 0 if stage == 0 else first + (stage - 1) * rest
        return list(range(begin, begin + (first if stage == 0 else rest)))
    own = layers // (stages * chunks)
    starts = [chunk * own * stages + stage * own for chunk in range(chunks)]
    return [layer for start in starts for layer in range(start, start + own)]
