"""Megatron shards -> a stream of (Hugging Face name, tensor) on the ranks that publish it.

Every trainer rank calls `export`; only rank 0's stream has entries or, spread, that of one rank per
pipeline stage and expert group. The plan (the rank that sends each shard, the shards of each
bucket) is made once per model and kept, because it depends on the layout alone: tensor, pipeline,
virtual pipeline, expert, expert-tensor and data parallel. Then each version costs one message per
sending rank and bucket: a rank flattens its shards of the bucket into bytes, and the destination
splits them, joins the tensor-parallel shards and renames. Of the ranks that hold a shard, the
lowest sends it; its replicas send nothing.

The names are exactly those of the checkpoint that the model was loaded from, at every version and
bucket size: a Hugging Face tensor that is made of several parameters (fused experts) is never split
over buckets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight
from megatron_rl.weights.number_format import WireFormat


@dataclass(frozen=True, slots=True)
class _Shard:
    """One shard of one parameter and the rank that sends it."""

    weight: int
    """Position in `Architecture.weights()`."""
    split_rank: int
    """Rank in the tensor-parallel group."""
    sender: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Shards that travel together to one rank."""

    destination: int
    shards: list[_Shard]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Shards and destinations, bucket by bucket; the same on every rank."""

    weights: list[Weight]
    buckets: list[_Bucket]

    @property
    def destinations(self) -> list[int]:
        """Ranks whose stream has entries, in ascending order."""
        return sorted({bucket.destination for bucket in self.buckets})


PlanKey = tuple[int, torch.dtype | None, bool]
"""(bucket bytes, number format, spread): a plan depends on these and the model."""


class ShardedModel(Protocol):
    """The parts of a model that the export uses; `megatron_rl.trainer.model.Policy` is one."""

    architecture: Architecture
    parameters: dict[str, torch.nn.Parameter]
    """This rank's parameters by `Weight.megatron`."""
    export_plans: dict[PlanKey, ExportPlan]
    """Filled by `export`."""

    def split_rank(self, weight: Weight) -> tuple[int, int]:
        """Return (rank, size) in the tensor-parallel group that shards the weight."""


def make_plan(
    policy: ShardedModel,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    *,
    spread: bool = False,
) -> ExportPlan:
    """Agree on sender and destination of every shard; collective over the trainer ranks.

    Args:
        policy: the sharded model.
        bucket_bytes: largest bucket, unless one Hugging Face tensor is larger.
        dtype: number format to travel in; None: the parameters' own.
        spread: join each tensor on the lowest rank that holds a part of it (one rank per pipeline
            stage and expert group), instead of all on rank 0.

    Raises:
        RuntimeError: a shard that no rank holds, or of another shape than the architecture's.
    """
    weights = [w for w in policy.architecture.weights() if w.exported]
    held: list[tuple[_Shard, int]] = []
    for i, w in enumerate(weights):
        if (p := policy.parameters.get(w.megatron)) is not None:
            part, size = policy.split_rank(w) if w.split.sharded else (0, 1)
            shard = _Shard(i, part, dist.get_rank(), tuple(p.shape), dtype or p.dtype)
            held.append((shard, size))
    everywhere: list[list[tuple[_Shard, int]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, held)
    owners: list[dict[int, _Shard]] = [{} for _ in weights]
    sizes = [1] * len(weights)
    for shard, size in itertools.chain(*everywhere):  # in the order of ranks
        owners[shard.weight].setdefault(shard.split_rank, shard)
        sizes[shard.weight] = size
    # Parameters of the same Hugging Face tensors form a unit, in the order of their first one.
    units: dict[tuple[str, ...], list[_Shard]] = {}
    for weight, shards, size in zip(weights, owners, sizes, strict=True):
        _check(weight, shards, size)
        units.setdefault(weight.hf, []).extend(shards[part] for part in range(size))
    return ExportPlan(weights, _fill(list(units.values()), bucket_bytes, spread=spread))


def _check(weight: Weight, shards: dict[int, _Shard], size: int) -> None:
    if sorted(shards) != list(range(size)):
        raise RuntimeError(
            f"shards {sorted(shards)} of {size} of {weight.megatron} are on trainer ranks: the"
            " export needs all of them"
        )
    for shard in shards.values():
        if shard.shape != weight.shard_shape(size):
            raise RuntimeError(
                f"{weight.megatron} has shape {list(shard.shape)} on trainer rank {shard.sender}:"
                f" a part of {size} of it has shape {list(weight.shard_shape(size))}"
            )


def _fill(units: list[list[_Shard]], bucket_bytes: int, *, spread: bool) -> list[_Bucket]:
    """Return the buckets in the order of their first unit, each open until it is full."""
    buckets: list[_Bucket] = []
    open_buckets: dict[int, tuple[_Bucket, int]] = {}
    for unit in units:
        destination = min(shard.sender for shard in unit) if spread else 0
        size = sum(shard.num_bytes for shard in unit)
        bucket, filled = open_buckets.get(destination, (None, 0))
        if bucket is None or filled + size > bucket_bytes:
            bucket, filled = _Bucket(destination, []), 0
            buckets.append(bucket)
        bucket.shards.extend(unit)
        open_buckets[destination] = (bucket, filled + size)
    return buckets


def export(
    policy: ShardedModel,
    bucket_bytes: int = 256 * 2**20,
    dtype: torch.dtype | None = None,
    *,
    spread: bool = False,
    on_cpu: bool = True,
    pace: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Return the current weights by Hugging Face name; collective over the trainer ranks.

    Args:
        policy: the sharded model; its plan is kept in `policy.export_plans`.
        bucket_bytes: bytes gathered at a time.
        dtype: number format to travel in; None: the parameters' own.
        spread: as in `make_plan`.
        on_cpu: the tensors are moved to the CPU, bucket by bucket.
        pace: group of all ranks in which they wait for the reader of a slow stream, bucket by
            bucket; without it a bucket is sent at once, and NCCL's time-out runs until it is read.

    Returns:
        On trainer rank 0 (with `spread`, on each of the plan's destinations) the stream of (name,
        new tensor); it must be read to its end. On other ranks an exhausted one: they have sent
        their shards when this returns.
    """
    key = (bucket_bytes, dtype, spread)
    plan = policy.export_plans.get(key)
    if plan is None:
        plan = policy.export_plans[key] = make_plan(policy, bucket_bytes, dtype, spread=spread)
    stream = _exchange(policy, plan, on_cpu, pace)
    if dist.get_rank() in plan.destinations:
        return stream
    return iter(list(stream))  # empty: it sends everything now


def export_for_generators(config: RunConfig, policy: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    """Return the weights in the form of the run's transport; collective as `export`."""
    wire = WireFormat.of(config)
    return wire.stream(
        export(
            policy,
            config.weights.bucket_bytes,
            wire.dtype,
            spread=config.weights.transport == "nccl",
            on_cpu=False,
        )
    )


def _exchange(
    policy: ShardedModel, plan: ExportPlan, on_cpu: bool, pace: dist.ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    # All ranks take the buckets in one order, so that no two wait for each other.
    rank = dist.get_rank()
    for bucket in plan.buckets:
        if pace is not None:
            dist.barrier(group=pace)
        if bucket.destination == rank:
            yield from _receive(policy, plan, bucket.shards, on_cpu)
        elif own := [shard for shard in bucket.shards if shard.sender == rank]:
            dist.send(_bytes_of(policy, plan, own), dst=bucket.destination)


def _bytes_of(policy: ShardedModel, plan: ExportPlan, shards: list[_Shard]) -> Tensor:
    parts = [
        policy.parameters[plan.weights[s.weight].megatron].detach().to(s.dtype) for s in shards
    ]
    return torch.cat([p.contiguous().view(-1).view(torch.uint8) for p in parts])


def _receive(
    policy: ShardedModel, plan: ExportPlan, shards: list[_Shard], on_cpu: bool
) -> Iterator[tuple[str, Tensor]]:
    rank = dist.get_rank()
    by_sender: dict[int, list[_Shard]] = {}
    for shard in shards:
        by_sender.setdefault(shard.sender, []).append(shard)
    tensors: dict[tuple[int, int], Tensor] = {}
    for sender, sent in by_sender.items():
        sizes = [shard.num_bytes for shard in sent]
        if sender == rank:
            flat = _bytes_of(policy, plan, sent)
        else:
            device = next(iter(policy.parameters.values())).device
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            dist.recv(flat, src=sender)
        for shard, part in zip(sent, (flat.cpu() if on_cpu else flat).split(sizes), strict=True):
            # A copy, because the bytes of a slice need not be aligned to their dtype.
            tensor = part.clone().view(shard.dtype).view(shard.shape)
            tensors[shard.weight, shard.split_rank] = tensor
    yield from _renamed(plan, tensors)


def _renamed(
    plan: ExportPlan, shards: dict[tuple[int, int], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    parts_of: dict[int, list[Tensor]] = {}
    for i, part in sorted(shards):
        parts_of.setdefault(i, []).append(shards[i, part])
    named: dict[str, list[Tensor]] = {}
    stacked: set[str] = set()
    for i, parts in parts_of.items():
        weight = plan.weights[i]
        tensors = weight.pack.to_huggingface(weight.split.unshard(parts))
        for name, tensor in zip(weight.hf, tensors, strict=True):
            named.setdefault(name, []).append(tensor)
            if weight.index is not None:
                stacked.add(name)
    for name, tensors in named.items():
        yield name, torch.stack(tensors) if name in stacked else tensors[0].contiguous()
