"""Megatron shards -> a stream of (Hugging Face name, tensor) on the ranks that take it.

A plan says which rank sends each shard and which rank joins each bucket of shards; it is made once
per model, because it depends on the layout alone. Then each version costs one message per sending
rank and bucket: a rank flattens its shards of the bucket into bytes, and the destination splits
them, joins the tensor-parallel shards and renames.

- A checkpoint (`export`) is joined on rank 0, under exactly the names of the checkpoint that the
  model was loaded from.
- A version for the generators (`export_buckets`) is spread: a bucket is joined by a rank that holds
  a part of it, and of these, replicas included, each gets its share. Every expert travels alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.models.mapping import Weight
from megatron_rl.weights.number_format import single_expert

if TYPE_CHECKING:
    from megatron_rl.trainer.shards import ModelShards

Stream = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class _Shard:
    """One shard of one parameter and the rank that sends it."""

    weight: int  # position in `Architecture.weights()`
    split_rank: int
    splits: int
    sender: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Shards that are joined together on one rank."""

    destination: int
    shards: list[_Shard]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Shards and destinations, bucket by bucket; the same on every rank."""

    weights: list[Weight]
    buckets: list[PlannedBucket]
    spread: bool


def plan_of(
    model: ModelShards, bucket_bytes: int, dtype: torch.dtype | None = None, *, spread: bool = False
) -> ExportPlan:
    """Return the plan of a model, made at the first call; that is collective over trainer ranks.

    A bucket has at most `bucket_bytes`, unless one Hugging Face tensor is larger. `dtype` is the
    number format to travel in, by default the parameters' own. `spread`: join each bucket on one of
    the ranks that hold a part of it, instead of on rank 0.

    Raises:
        RuntimeError: a shard that no rank holds, or of another shape than the architecture's.
    """
    key = (bucket_bytes, dtype, spread)
    if key in model.export_plans:
        return model.export_plans[key]
    weights = [w for w in model.architecture.weights() if w.exported]
    held: list[_Shard] = []
    for i, w in enumerate(weights):
        if (p := model.parameters.get(w.megatron)) is not None:
            split = model.split_rank(w) if w.split.sharded else (0, 1)
            held.append(_Shard(i, *split, dist.get_rank(), tuple(p.shape), dtype or p.dtype))
    everywhere: list[list[_Shard]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, held)
    holders: list[dict[int, list[_Shard]]] = [{} for _ in weights]
    for shard in itertools.chain(*everywhere):  # in the order of ranks
        holders[shard.weight].setdefault(shard.split_rank, []).append(shard)
    # Parameters of the same Hugging Face tensors form a unit, in the order of their first one.
    units: dict[tuple[str, ...], list[list[_Shard]]] = {}
    for weight, parts in zip(weights, holders, strict=True):
        size = next(iter(parts.values()))[0].splits if parts else 1
        if sorted(parts) != list(range(size)):
            raise RuntimeError(
                f"shards {sorted(parts)} of {size} of {weight.megatron} are on trainer ranks: the"
                " export needs all of them"
            )
        for shard in itertools.chain(*parts.values()):
            if shard.shape != weight.shard_shape(size):
                raise RuntimeError(
                    f"{weight.megatron} has shape {list(shard.shape)} on trainer rank"
                    f" {shard.sender}: a part of {size} has shape {list(weight.shard_shape(size))}"
                )
        name = (weight.megatron,) if spread and weight.index is not None else weight.hf
        units.setdefault(name, []).extend(parts[part] for part in range(size))
    buckets = _fill(list(units.values()), bucket_bytes, spread=spread)
    model.export_plans[key] = ExportPlan(weights, buckets, spread)
    return model.export_plans[key]


def _fill(
    units: list[list[list[_Shard]]], bucket_bytes: int, *, spread: bool
) -> list[PlannedBucket]:
    """Return the buckets in the order of their first unit, each open until it is full.

    A unit lists the holders of each of its shards.
    """
    buckets: list[PlannedBucket] = []
    open_buckets: dict[int, tuple[PlannedBucket, int]] = {}
    loads: Counter[int] = Counter()
    for unit in units:
        destination = 0
        if spread:
            ranks = {shard.sender for holders in unit for shard in holders}
            destination = min(ranks, key=lambda rank: (loads[rank], rank))
        size = sum(holders[0].num_bytes for holders in unit)
        loads[destination] += size
        bucket, filled = open_buckets.get(destination, (None, 0))
        if bucket is None or filled + size > bucket_bytes:
            bucket, filled = PlannedBucket(destination, []), 0
            buckets.append(bucket)
        # The destination's own shard, else the nearest one; without `spread` the lowest rank's.
        bucket.shards.extend(min(h, key=lambda s: abs(s.sender - destination)) for h in unit)
        open_buckets[destination] = (bucket, filled + size)
    return buckets


def export(
    model: ModelShards,
    bucket_bytes: int = 256 * 2**20,
    dtype: torch.dtype | None = None,
    *,
    pace: dist.ProcessGroup | None = None,
) -> Stream:
    """Return the current weights by Hugging Face name; collective over the trainer ranks.

    Trainer rank 0 gets the stream of (name, new CPU tensor), which must be read to its end; other
    ranks an exhausted one: they have sent their shards. `bucket_bytes` are gathered at a time.
    `pace` is a group of all ranks in which they wait for the reader of a slow stream, bucket by
    bucket; without it a bucket is sent at once, and NCCL's time-out runs until it is read.
    """
    plan = plan_of(model, bucket_bytes, dtype)
    buckets = export_buckets(model, plan, on_cpu=True, pace=pace)
    stream = itertools.chain.from_iterable(named for _, named in buckets)
    # Elsewhere it is empty: it sends everything now.
    return stream if dist.get_rank() == 0 else iter(list(stream))


def export_buckets(
    model: ModelShards,
    plan: ExportPlan,
    *,
    on_cpu: bool = False,
    pace: dist.ProcessGroup | None = None,
) -> Iterator[tuple[int, Stream]]:
    """Yield (number of the bucket, its tensors) for each bucket that this rank joins; collective.

    The tensors are on the parameters' device, or on the CPU. In a plan that is spread, experts are
    single matrices (`number_format`). `pace` is that of `export`.
    """
    # All ranks take the buckets in one order, so that no two wait for each other.
    rank = dist.get_rank()
    for number, bucket in enumerate(plan.buckets):
        if pace is not None:
            dist.barrier(group=pace)
        if bucket.destination == rank:
            yield number, _receive(model, plan, bucket.shards, on_cpu)
        elif own := [shard for shard in bucket.shards if shard.sender == rank]:
            dist.send(_bytes_of(model, plan, own), dst=bucket.destination)


def planned_tensors(plan: ExportPlan, bucket: PlannedBucket) -> Stream:
    """Yield names and tensors of a bucket on `meta`, as `export_buckets` does."""
    shards = {
        (s.weight, s.split_rank): torch.empty(s.shape, dtype=s.dtype, device="meta")
        for s in bucket.shards
    }
    return _renamed(plan, shards)


def _bytes_of(model: ModelShards, plan: ExportPlan, shards: list[_Shard]) -> Tensor:
    parts = [model.parameters[plan.weights[s.weight].megatron].detach().to(s.dtype) for s in shards]
    return torch.cat([p.contiguous().view(-1).view(torch.uint8) for p in parts])


def _receive(model: ModelShards, plan: ExportPlan, shards: list[_Shard], on_cpu: bool) -> Stream:
    rank = dist.get_rank()
    by_sender: dict[int, list[_Shard]] = {}
    for shard in shards:
        by_sender.setdefault(shard.sender, []).append(shard)
    tensors: dict[tuple[int, int], Tensor] = {}
    for sender, sent in by_sender.items():
        sizes = [shard.num_bytes for shard in sent]
        if sender == rank:
            flat = _bytes_of(model, plan, sent)
        else:
            device = next(iter(model.parameters.values())).device
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            dist.recv(flat, src=sender)
        for shard, part in zip(sent, (flat.cpu() if on_cpu else flat).split(sizes), strict=True):
            # A copy, because the bytes of a slice need not be aligned to their dtype.
            tensor = part.clone().view(shard.dtype).view(shard.shape)
            tensors[shard.weight, shard.split_rank] = tensor
    yield from _renamed(plan, tensors)


def _renamed(plan: ExportPlan, shards: dict[tuple[int, int], Tensor]) -> Stream:
    experts: dict[str, list[Tensor]] = {}
    for i, own in itertools.groupby(sorted(shards), key=lambda key: key[0]):
        weight = plan.weights[i]
        tensors = weight.pack.to_huggingface(weight.split.unshard([shards[key] for key in own]))
        for name, tensor in zip(weight.hf, tensors, strict=True):
            if weight.index is None:
                yield name, tensor.contiguous()
            elif plan.spread:
                yield from single_expert(name, weight.index, tensor)
            else:
                experts.setdefault(name, []).append(tensor)
    for name, tensors in experts.items():
        yield name, torch.stack(tensors)
