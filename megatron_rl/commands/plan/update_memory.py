"""Memory and time of a weight update on both of its ends.

A sender joins a version bucket by bucket (`weights.export`), and by `nccl` it sends chunk by chunk
while training continues (`transports.nccl`, vLLM's packed broadcast). A fused tensor of all experts
that is larger than `weights.bucket_bytes` makes a bucket and a chunk of its own size.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from megatron_rl.commands.plan.tensors import SentUnit, largest_module, sent_bytes, sent_units
from megatron_rl.config import RunConfig

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

LINK_BYTES_PER_SECOND = 50.0e9
"""Peak of 400 Gb/s InfiniBand."""
COMMUNICATOR_BYTES = 160 * 2**20
"""Estimate of NCCL's buffers: 16 channels of about 10 MiB for its three protocols."""
EXPORT_COPIES = 3
"""Copies of a bucket while it is joined: shards, joined tensors, stacked experts."""
RELOAD_COPIES = 2
"""Copies of a module while vLLM loads it: as loaded, and in the layout of its kernels."""


def bucket_bytes(run: RunConfig, units: list[SentUnit]) -> int:
    """Return the bytes of the largest bucket in which a sender joins these units."""
    sizes = [unit.joined for unit in units]
    return min(sum(sizes), max(run.weights.bucket_bytes, *sizes)) if sizes else 0


def sender_memory(
    run: RunConfig, architecture: Architecture, stage: int
) -> tuple[float, float, float]:
    """Return export, staging and communicators of the first rank of a stage (`StageMemory`)."""
    from megatron_rl.weights.transports.nccl_plan import BUFFERS, TRANSFERS_AT_ONCE

    units = sent_units(run, architecture, stage)
    export = EXPORT_COPIES * bucket_bytes(run, units)
    if run.weights.transport != "nccl":
        return export, 0, 0
    # Of the newest chunk, the tensors and their concatenation; the others are still being sent.
    staging = TRANSFERS_AT_ONCE * _largest_window(run, units, copies=2, before=BUFFERS - 1)
    return export, staging, run.roles.engines * COMMUNICATOR_BYTES


def receiver_bytes(run: RunConfig, architecture: Architecture) -> float:
    """Return the bytes of an update on a generator's device, outside vLLM's own memory."""
    from megatron_rl.weights.transports.nccl_plan import BUFFERS

    module = largest_module(run, architecture) / run.roles.generator_tensor_parallel
    size = RELOAD_COPIES * module
    if run.weights.transport != "nccl":
        return size
    chunks = waiting = senders = 0
    for stage in range(run.parallel.pipeline):
        units = sent_units(run, architecture, stage)
        # The buffer that the newest one replaces is still there while that is allocated.
        chunks = max(chunks, _largest_window(run, units, copies=1, before=BUFFERS))
        # vLLM keeps a layer's experts as received until the last group of experts has arrived.
        of_experts = own_expert_bytes(units)
        groups = run.parallel.expert if of_experts else 1
        waiting, senders = max(waiting, (groups - 1) * of_experts), senders + groups
    return size + chunks + waiting + senders * COMMUNICATOR_BYTES


def own_expert_bytes(units: list[SentUnit]) -> int:
    """Return the bytes of a sender's experts that have tensors of their own."""
    return sent_bytes(unit for unit in units if unit.expert is not None)


def update_seconds(run: RunConfig, architecture: Architecture) -> float:
    """Return the seconds until the last generator has an update, at 400 Gb/s.

    A sender's network interface carries one copy for every engine; files are read by all at once.
    """
    copies = 1 if run.weights.transport == "disk" else run.roles.engines
    stages = range(run.parallel.pipeline)
    largest = max(sent_bytes(sent_units(run, architecture, stage)) for stage in stages)
    return copies * largest / LINK_BYTES_PER_SECOND


def _largest_window(run: RunConfig, units: list[SentUnit], copies: int, before: int) -> int:
    """Return the most bytes of `copies` of a chunk and the `before` chunks sent before it."""
    from megatron_rl.weights.transports.nccl_plan import chunk_counts

    sizes = [size for unit in units for size in unit.sent]
    counts, rest = chunk_counts(sizes, run.weights.bucket_bytes), iter(sizes)
    chunks = [sum(itertools.islice(rest, count)) for count in counts]
    return max(copies * size + sum(chunks[max(0, i - before) : i]) for i, size in enumerate(chunks))
