"""Four gloo processes that export models of every architecture in many layouts.

Started by `test_export.py`. The model is a stand-in: the shards that Megatron's ranks would hold,
cut from whole tensors. What it does not exercise: where Megatron itself puts a parameter
(`tests/trainer` does).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.models import architecture, tiny
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight
from megatron_rl.trainer.export import ExportPlan, export, export_buckets, plan_of
from megatron_rl.weights.number_format import WireFormat

WORLD = 4


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; ranks count tensor first, then data, then pipeline, as Megatron's do."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def uses_experts(self) -> bool:
        return self.expert * self.expert_tensor > 1

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor

    def stage(self, rank: int) -> int:
        return rank // (WORLD // self.pipeline)

    def expert_tensor_rank(self, rank: int) -> int:
        return rank % self.expert_tensor

    def expert_rank(self, rank: int) -> int:
        return rank % (WORLD // self.pipeline) // self.expert_tensor % self.expert

    def stage_of(self, layer: int, layers: int) -> int:
        """Layers go round the stages, in as many turns as a stage has chunks."""
        return layer * self.pipeline * self.chunks // layers % self.pipeline


LAYOUTS = {
    "DP4": Layout(),
    "TP4": Layout(tensor=4),
    "TP2 PP2 VPP2": Layout(tensor=2, pipeline=2, chunks=2),
    "EP4": Layout(expert=4),
    "EP2 DP2": Layout(expert=2),
    "EP2 ETP2": Layout(expert=2, expert_tensor=2),
    "TP2 EP2": Layout(tensor=2, expert=2),
    "TP2 EP2 ETP2": Layout(tensor=2, expert=2, expert_tensor=2),
    "PP2 EP2": Layout(pipeline=2, expert=2),
    "PP2 VPP2 EP2": Layout(pipeline=2, chunks=2, expert=2),
    "PP2 ETP2": Layout(pipeline=2, expert_tensor=2),
}
DENSE = ("DP4", "TP4", "TP2 PP2 VPP2")
MOE = ("TP2 PP2 VPP2", *(label for label, layout in LAYOUTS.items() if layout.uses_experts))
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 31}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama tied": ("tiny_dense", {**SIZES, "tie_word_embeddings": True}, DENSE),
    "qwen3": ("tiny_qwen3", SIZES, ("TP2 PP2 VPP2",)),
    "qwen3_moe": ("tiny_qwen3_moe", {**SIZES, "num_local_experts": 4}, MOE),
    "llama4": ("tiny_scout", SIZES, ("EP4", "EP2 ETP2", "PP2 EP2", "TP2 PP2 VPP2")),
}
"""Name -> (tiny model, changes of its config.json, layouts)."""
SMALL, BF16 = 20_000, torch.bfloat16
EXPORTS: list[tuple[int, int, torch.dtype | None, bool]] = [
    (0, 1, None, False),
    (0, 2**30, None, True),
    (1, SMALL, None, False),
    (1, SMALL, None, True),
    (2, SMALL, None, False),
    (2, SMALL, None, True),
    (2, SMALL, BF16, True),
]
"""(version, bucket bytes, number format, spread), in the order in which they are made."""


@cache
def whole(weight: Weight, version: int) -> Tensor:
    """Return the whole Megatron tensor, the same on every rank; `Split` removes padded rows."""
    seed = zlib.crc32(f"{weight.hf} {weight.megatron} {version}".encode())
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Sharded:
    """What `export` needs of a model."""

    architecture: Architecture
    layout: Layout
    rank: int
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    export_plans: dict[Any, Any] = field(default_factory=dict)

    def split_rank(self, weight: Weight) -> tuple[int, int]:
        if weight.expert is None:
            return self.layout.tensor_rank(self.rank), self.layout.tensor
        return self.layout.expert_tensor_rank(self.rank), self.layout.expert_tensor

    def holds(self, weight: Weight) -> bool:
        last = self.layout.pipeline - 1
        stage = 0 if weight.megatron.startswith("embedding") else last
        if weight.layer is not None:
            stage = self.layout.stage_of(weight.layer, self.architecture.layers)
        if stage != self.layout.stage(self.rank):
            return False
        if weight.expert is None:
            return True
        own = self.architecture.experts // self.layout.expert
        return weight.expert // own == self.layout.expert_rank(self.rank)

    def fill(self, version: int) -> None:
        for weight in self.architecture.weights():
            if self.holds(weight):
                shard = weight.split.shard(whole(weight, version), *self.split_rank(weight))
                self.parameters[weight.megatron] = torch.nn.Parameter(shard.clone())


@cache
def expected(kind: Architecture, version: int) -> dict[str, Tensor]:
    """Return the checkpoint's tensors."""
    parts: dict[str, list[Tensor]] = {}
    for weight in kind.weights():
        if weight.exported:
            for name, tensor in zip(
                weight.hf, weight.pack.to_huggingface(whole(weight, version)), strict=True
            ):
                parts.setdefault(name, []).append(tensor)
    fused = {n for w in kind.weights() if w.index is not None for n in w.hf}
    return {n: torch.stack(t) if n in fused else t[0] for n, t in parts.items()}


def exported(
    policy: Sharded, bucket_bytes: int, dtype: torch.dtype | None, spread: bool
) -> tuple[dict[str, Tensor], list[int]]:
    """Return (the tensors that this rank joins, numbers of its buckets)."""
    if not spread:
        return dict(export(policy, bucket_bytes, dtype)), []
    tensors: dict[str, Tensor] = {}
    numbers = []
    for number, named in export_buckets(policy, plan_of(policy, bucket_bytes, dtype, spread=True)):
        numbers.append(number)
        tensors |= named
    return tensors, numbers


def observe(policy: Sharded, received: list[int]) -> dict[str, Any]:
    """Return the faults of the exports, and how the spread ones share the work.

    `received` is the list to which each `dist.recv` of this rank appends its bytes.
    """
    wrong: list[str] = []
    shares: list[Any] = []
    for version, bucket_bytes, dtype, spread in EXPORTS:
        policy.fill(version)
        received.clear()
        wanted = expected(policy.architecture, version)
        order = list(policy.architecture.shapes())
        own, numbers = exported(policy, bucket_bytes, dtype, spread)
        if spread:
            wanted = dict(WireFormat(torch.float32).stream(iter(wanted.items())))
        bad = [n for n, t in own.items() if not torch.equal(t, wanted[n].to(t.dtype))]
        bad += [n for n, t in own.items() if t.dtype != (dtype or torch.float32)]
        views: list[Any] = [None] * WORLD
        dist.all_gather_object(views, (list(own), bad, numbers, list(received)))
        what = f"version {version}, buckets {bucket_bytes}, {dtype}, spread {spread}"
        sent = [n for stream, *_ in views for n in stream]
        if sorted(sent) != sorted(wanted):
            wrong.append(f"{what}: names {sorted(set(sent) ^ wanted.keys())[:3]}")
        if not spread and views[0][0] != order:
            wrong.append(f"{what}: order")
        wrong += [f"{what}: {n}" for _, bad, *_ in views for n in bad]
        if spread:
            plan = plan_of(policy, bucket_bytes, dtype, spread=True)
            shares.append([share(policy, plan, view[2], view[3]) for view in views])
    return {"wrong": wrong, "shares": shares, "plans": len(policy.export_plans)}


def share(
    policy: Sharded, plan: ExportPlan, numbers: list[int], received: list[int]
) -> dict[str, Any]:
    """Return what a rank that joined these buckets and received these bytes should have."""
    buckets = [plan.buckets[number] for number in numbers]
    rank = buckets[0].destination if buckets else None
    holder = None if rank is None else Sharded(policy.architecture, policy.layout, rank)
    joined, foreign, largest, not_held = 0, 0, 0, []
    for bucket in buckets:
        own = 0
        for shard in bucket.shards:
            weight = plan.weights[shard.weight]
            joined += shard.num_bytes
            assert holder is not None
            if not holder.holds(weight):
                not_held.append(weight.megatron)
            elif weight.split.sharded and holder.split_rank(weight)[0] != shard.split_rank:
                own += shard.num_bytes
        foreign, largest = foreign + own, max(largest, own)
    return {
        "rank": rank,
        "joined": joined,
        "not held": not_held,
        "received": sum(received),
        "needed": foreign,
        "largest message": max(received, default=0),
        "largest bucket": max((sum(s.num_bytes for s in b.shards) for b in buckets), default=0),
        "weights": sorted(w.megatron for w in plan.weights if holder and holder.holds(w)),
        "largest unit": max(
            int(torch.Size(w.shape).numel()) * plan.buckets[0].shards[0].dtype.itemsize
            for w in plan.weights
        ),
    }


def counting(received: list[int]) -> None:
    """Make `dist.recv` append the bytes of each message to a list."""
    receive = dist.recv

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        received.append(tensor.numel() * tensor.element_size())
        return receive(tensor, *args, **kwargs)

    dist.recv = counted


def main(rank: int, folder: Path) -> None:
    """Rank 0 writes what all saw."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), WORLD), rank=rank, world_size=WORLD
    )
    seen: dict[str, Any] = {}
    received: list[int] = []
    counting(received)
    for case, (name, changes, layouts) in CASES.items():
        kind = architecture({**tiny.CONFIGS[name], **changes})
        for label in layouts:
            seen[f"{case}, {label}"] = observe(Sharded(kind, LAYOUTS[label], rank), received)
    if rank == 0:
        torch.save(seen, folder / "seen.pt")
    dist.destroy_process_group()
