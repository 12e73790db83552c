"""Megatron shards -> a stream of (Hugging Face name, CPU tensor) on trainer rank 0.

Every trainer rank calls `export`; only rank 0's stream has entries. The plan (which rank holds
which shard, what travels together) is made once per model and kept, because it depends on the
layout alone. Then each version costs one message per sending rank and bucket: a rank flattens its
shards of the bucket into bytes, and rank 0 cuts them up, pastes the tensor-parallel shards
together and renames. Replicas send nothing: of the ranks that hold a shard, the lowest does.

The names are exactly those of the checkpoint that the model was loaded from, at every version and
bucket size: a Hugging Face tensor that several parameters make up (fused experts) never leaves its
bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight


@dataclass(frozen=True, slots=True)
class _Shard:
    """One shard of one parameter and who sends it."""

    weight: int
    """Position in `Architecture.weights()`."""
    split_rank: int
    """Which of the tensor-parallel shards it is."""
    sender: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What travels, bucket by bucket; the same on every rank."""

    weights: list[Weight]
    buckets: list[list[_Shard]]


class ShardedModel(Protocol):
    """What the export needs of a model; `megatron_rl.policy.model.Policy` is one."""

    architecture: Architecture
    parameters: dict[str, torch.nn.Parameter]
    """This rank's parameters by `Weight.megatron`."""
    export_plans: dict[int, ExportPlan]
    """Plans by bucket size; filled here."""

    def split_rank(self, weight: Weight) -> tuple[int, int]:
        """(rank, size) of the tensor-parallel group that shards the weight."""


def make_plan(policy: ShardedModel, bucket_bytes: int) -> ExportPlan:
    """Agrees on who sends what; collective over the trainer ranks.

    Args:
        policy: the sharded model.
        bucket_bytes: a bucket holds this much at most, or one Hugging Face tensor.

    Raises:
        RuntimeError: a shard that no rank holds.
    """
    weights = [w for w in policy.architecture.weights() if w.exported]
    held = {
        (i, policy.split_rank(w)[0] if w.split.sharded else 0): (
            tuple(p.shape),
            p.dtype,
            policy.split_rank(w)[1],
        )
        for i, w in enumerate(weights)
        if (p := policy.parameters.get(w.megatron)) is not None
    }
    everywhere: list[dict[tuple[int, int], tuple[tuple[int, ...], torch.dtype, int]]]
    everywhere = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, held)
    owners: list[dict[int, _Shard]] = [{} for _ in weights]
    sizes = [1] * len(weights)
    for rank, theirs in enumerate(everywhere):
        for (i, part), (shape, dtype, parts) in theirs.items():
            owners[i].setdefault(part, _Shard(i, part, rank, shape, dtype))
            sizes[i] = parts if weights[i].split.sharded else 1
    for weight, found, size in zip(weights, owners, sizes, strict=True):
        if sorted(found) != list(range(size)):
            raise RuntimeError(
                f"shards {sorted(found)} of {size} of {weight.megatron} are on trainer ranks: the"
                " export needs all of them"
            )
    buckets: list[list[_Shard]] = []
    filled = 0
    for unit in _units(weights):
        own = [owners[i][part] for i in unit for part in range(sizes[i])]
        size = sum(shard.num_bytes for shard in own)
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1] += own
        filled += size
    return ExportPlan(weights, buckets)


def _units(weights: list[Weight]) -> list[list[int]]:
    """Weights that make up the same Hugging Face tensors, in order of their first one."""
    units: dict[tuple[str, ...], list[int]] = {}
    for i, weight in enumerate(weights):
        units.setdefault(weight.hf, []).append(i)
    return list(units.values())


def export(policy: ShardedModel, bucket_bytes: int = 256 * 2**20) -> Iterator[tuple[str, Tensor]]:
    """The current weights under their Hugging Face names; collective over the trainer ranks.

    Args:
        policy: the sharded model; its plan is kept in `policy.export_plans`.
        bucket_bytes: bytes gathered at a time.

    Returns:
        On trainer rank 0 the stream of (name, CPU tensor of its own); it must be read to its end.
        On other ranks an exhausted one: they have sent their shards when this returns.
    """
    plan = policy.export_plans.get(bucket_bytes)
    if plan is None:
        plan = policy.export_plans[bucket_bytes] = make_plan(policy, bucket_bytes)
    if dist.get_rank() == 0:
        return _receive(policy, plan)
    for bucket in plan.buckets:
        _send(policy, plan, bucket)
    return iter(())


def _bytes_of(policy: ShardedModel, plan: ExportPlan, shards: list[_Shard]) -> Tensor:
    parts = [policy.parameters[plan.weights[s.weight].megatron].detach() for s in shards]
    return torch.cat([p.contiguous().view(-1).view(torch.uint8) for p in parts])


def _send(policy: ShardedModel, plan: ExportPlan, bucket: list[_Shard]) -> None:
    own = [shard for shard in bucket if shard.sender == dist.get_rank()]
    if own:
        dist.send(_bytes_of(policy, plan, own), dst=0)


def _receive(policy: ShardedModel, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
    for bucket in plan.buckets:
        by_sender: dict[int, list[_Shard]] = {}
        for shard in bucket:
            by_sender.setdefault(shard.sender, []).append(shard)
        found: dict[tuple[int, int], Tensor] = {}
        for sender, shards in by_sender.items():
            if sender == 0:
                flat = _bytes_of(policy, plan, shards)
            else:
                size = sum(shard.num_bytes for shard in shards)
                device = next(iter(policy.parameters.values())).device
                flat = torch.empty(size, dtype=torch.uint8, device=device)
                dist.recv(flat, src=sender)
            for shard, part in zip(
                shards, flat.cpu().split([shard.num_bytes for shard in shards]), strict=True
            ):
                # A copy, because the bytes of a slice need not be aligned to their dtype.
                tensor = part.clone().view(shard.dtype).view(shard.shape)
                found[shard.weight, shard.split_rank] = tensor
        yield from _renamed(plan, found)


def _renamed(
    plan: ExportPlan, found: dict[tuple[int, int], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    parts_of: dict[int, list[Tensor]] = {}
    for i, part in sorted(found):
        parts_of.setdefault(i, []).append(found[i, part])
    named: dict[str, list[Tensor]] = {}
    stacked: set[str] = set()
    for i, parts in parts_of.items():
        weight = plan.weights[i]
        tensors = weight.pack.part(weight.split.paste(parts))
        for name, tensor in zip(weight.hf, tensors, strict=True):
            named.setdefault(name, []).append(tensor)
            if weight.index is not None:
                stacked.add(name)
    for name, tensors in named.items():
        yield name, torch.stack(tensors) if name in stacked else tensors[0].contiguous()
