"""Parallel sizes of trainer and generators as one value, and why some don't work."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import ValidationError

from megatron_rl.config import RunConfig
from megatron_rl.models.division import problems

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Who holds what.

    Example: Scout on 80 GPUs: `Layout(trainer_ranks=16, generator_ranks=64, tensor=4, expert=16,
    sequence_parallel=True, recompute="full", generator_tensor=2)`.
    """

    trainer_ranks: int
    generator_ranks: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    recompute: Recompute = "none"
    generator_tensor: int = 1

    @classmethod
    def of(cls, run: RunConfig) -> Self:
        """The layout of a configuration."""
        p, r = run.parallel, run.roles
        names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
        switches = ("sequence_parallel", "distributed_optimizer", "recompute")
        return cls(
            r.trainer_ranks,
            r.generator_ranks,
            **{name: getattr(p, name) for name in (*names, *switches)},
            generator_tensor=r.generator_tensor_parallel,
        )

    @property
    def world(self) -> int:
        """Ranks of the run."""
        return self.trainer_ranks + self.generator_ranks

    @property
    def copies(self) -> int:
        """Ranks that hold the same dense parameters; over these optimizer state is sharded."""
        return self.trainer_ranks // (self.tensor * self.pipeline)

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same expert parameters."""
        return self.trainer_ranks // (self.expert * self.expert_tensor * self.pipeline)

    def values(self) -> dict[str, Any]:
        """As sections of a configuration."""
        parallel = asdict(self)
        trainers, generators, width = (
            parallel.pop(name) for name in ("trainer_ranks", "generator_ranks", "generator_tensor")
        )
        roles = {"trainer_ranks": trainers, "generator_ranks": generators}
        return {"roles": {**roles, "generator_tensor_parallel": width}, "parallel": parallel}

    def with_(self, **changes: Any) -> Layout:
        """A copy with other sizes."""
        return replace(self, **changes)

    def options(self) -> str:
        """As command-line options, those that differ from the defaults."""
        default = Layout(self.trainer_ranks, self.generator_ranks).values()
        return " ".join(
            f"--{section}.{key} {str(value).lower() if isinstance(value, bool) else value}"
            for section, keys in self.values().items()
            for key, value in keys.items()
            if section == "roles" or value != default[section][key]
        )

    def __str__(self) -> str:
        p = f"tensor {self.tensor} x pipeline {self.pipeline}"
        if self.virtual_pipeline > 1:
            p += f" ({self.virtual_pipeline} chunks)"
        if self.context > 1:
            p += f" x context {self.context}"
        data = self.copies // self.context
        more = f", expert {self.expert} (tensor {self.expert_tensor})" if self.expert > 1 else ""
        return (
            f"{self.trainer_ranks} trainers: {p} x data {data}{more}, recompute {self.recompute};"
            f" {self.generator_ranks} generators of tensor {self.generator_tensor}"
        )


def configured(run: RunConfig, layout: Layout) -> RunConfig | list[str]:
    """The configuration with this layout, or the reasons why its sizes don't fit together."""
    values = {**run.model_dump(), **layout.values()}
    try:
        return RunConfig.model_validate(values)
    except ValidationError as e:
        return [
            str(error["ctx"]["error"])
            if "ctx" in error and "error" in error["ctx"]
            else error["msg"]
            for error in e.errors()
        ]


def node_problems(layout: Layout, gpus_per_node: int) -> list[str]:
    """Groups that would cross nodes, where vLLM cannot follow or tensor parallelism crawls."""
    found = []
    if layout.tensor > gpus_per_node:
        found.append(
            f"parallel.tensor is {layout.tensor}: a node has {gpus_per_node} GPUs, and"
            " tensor-parallel ranks should share one; use parallel.pipeline beyond"
        )
    width = layout.generator_tensor
    starts = range(layout.trainer_ranks, layout.world, width)
    crossing = [s for s in starts if s // gpus_per_node != (s + width - 1) // gpus_per_node]
    if crossing:
        found.append(
            f"roles.generator_tensor_parallel is {width}: the engine of ranks {crossing[0]}-"
            f"{crossing[0] + width - 1} lies on two nodes of {gpus_per_node} GPUs; use a size that"
            " divides both roles.gpus_per_node and roles.trainer_ranks"
        )
    return found


def division_problems(run: RunConfig, layout: Layout, architecture: Architecture) -> list[str]:
    """Why this model cannot be run in this layout; empty: it can."""
    fitted = configured(run, layout)
    if isinstance(fitted, list):
        return fitted
    found = problems(fitted.parallel, architecture)
    width = layout.generator_tensor
    if architecture.heads % width:
        found.append(
            f"roles.generator_tensor_parallel is {width}: the model has {architecture.heads}"
            " attention heads, which vLLM cannot divide so; choose a size that divides them"
        )
    if architecture.groups % width and width % architecture.groups:
        found.append(
            f"roles.generator_tensor_parallel is {width}: the model has {architecture.groups}"
            " key-value heads, which vLLM can neither divide nor repeat so"
        )
    return found
