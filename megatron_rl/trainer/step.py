"""One RL step of the trainer: a batch in, one optimizer step and its metrics out.

The trainer computes `sum(loss_weight * term)` over the whole batch and nothing else; the
orchestrator has put every divisor into the loss weights.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import liveness, messages
from megatron_rl.config import RunConfig
from megatron_rl.trainer import world
from megatron_rl.trainer.batch import (
    MicroBatch,
    check_routed_experts,
    layout_of,
    micro_batches_of,
    parts_of,
)
from megatron_rl.trainer.loss import Objective
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.reference import FixedPolicies, old_is_current
from megatron_rl.trainer.shards import ModelShards
from megatron_rl.trainer.start_comparison import StartComparison
from megatron_rl.trainer.step_metrics import joined, report

PIECE_BYTES = 2**28  # of a batch in one message between ranks, at most
_decode = msgspec.msgpack.Decoder(messages.Batch).decode


class BatchSource(Protocol):
    """Source of rank 0's batches."""

    def next_batch(self, step: int) -> messages.Batch:
        """Return the batch of a step."""


def next_batch(
    client: BatchSource | None,
    step: int,
    stop_requested: Callable[[], bool],
    shards: ModelShards,
) -> tuple[messages.Batch, bool]:
    """Return (this rank's part of the batch, True if any rank was interrupted); collective.

    Rank 0 has the client, and sends each part to one rank of the model-parallel group that trains
    it, which passes it on. A part may have more than 4 GiB: it travels in pieces.

    Raises:
        ValueError: on rank 0, a batch whose arrays don't fit together.
    """
    liveness.sign("training", step)
    group, groups, rank = world.control_group(), world.row_groups(), dist.get_rank()
    batch, own = None if client is None else client.next_batch(step), bytearray()
    stop = torch.tensor([int(stop_requested())])
    dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=group)
    if batch is not None:
        parts = [batch] * len(groups) if batch.stop else parts_of(batch, layout_of(shards))
        for (ranks, _), part in zip(groups, parts, strict=True):
            if ranks[0] == rank:
                own = _encoded(part)
            else:
                _moved(_encoded(part), partial(dist.send, dst=ranks[0], group=group))
    ranks, peers = next(each for each in groups if rank in each[0])
    if rank == ranks[0] != 0:
        own = _moved(own, partial(dist.recv, src=0, group=group))
    if peers is not None:
        own = _moved(own, partial(dist.broadcast, src=ranks[0], group=peers))
    return _decode(own), bool(stop)


def _encoded(part: Any) -> bytearray:
    data = bytearray()
    msgspec.msgpack.Encoder().encode_into(part, data)
    return data


def _moved(data: bytearray, move: Callable[[Tensor], Any]) -> bytearray:
    """Move the number of bytes and then the bytes, and return them; a receiver gives none."""
    move(size := torch.tensor([len(data)]))
    data = data or bytearray(int(size))
    for piece in torch.frombuffer(data, dtype=torch.uint8).split(PIECE_BYTES):
        move(piece)
    return data


def token_results(
    batch: messages.Batch, micro_batches: Sequence[MicroBatch], shards: ModelShards
) -> tuple[bytes, bytes]:
    """Return `StepDone.ratios` and `.entropies` on rank 0, from one rank per token; collective.

    12 significant bits of each are kept. Nothing is returned on other ranks, and in steps whose
    files do not have them.
    """
    metrics = shards.run.metrics
    if not (metrics.rollouts_ratios and metrics.records(batch.step)):
        return b"", b""
    group, rank = world.control_group(), dist.get_rank()
    reports = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    reports[rank] = shards.reports
    dist.all_reduce(reports, group=group)
    own = bytearray()
    if shards.reports:
        names = ("source", "logprobs", "generator_logprobs", "entropy")
        source, new, old, entropy = (joined(micro_batches, f"{name}_T") for name in names)
        ratio = (new.double() - old.double()).exp()
        own = _encoded([messages.int_bytes(source), _rounded(ratio), _rounded(entropy)])
    if rank:
        if own:
            _moved(own, partial(dist.send, dst=0, group=group))
        return b"", b""
    bounds, lengths = messages.ints(batch.bounds), messages.ints(batch.prompt_lengths)
    values_2N = np.full((2, bounds[-1]), np.nan, "<f4")
    for other in reports.nonzero().flatten().tolist():
        if other:
            own = _moved(bytearray(), partial(dist.recv, src=other, group=group))
        positions, *parts = msgspec.msgpack.decode(own)
        values_2N[:, messages.ints(positions)] = [messages.floats(part) for part in parts]
    is_prompt = np.arange(bounds[-1]) < np.repeat(bounds[:-1] + lengths, np.diff(bounds))
    ratios, entropies = values_2N[:, ~is_prompt]
    return ratios.tobytes(), entropies.tobytes()


def _rounded(values: Tensor) -> bytes:
    bits = values.numpy().astype("<f4").view("<u4")
    return ((bits + np.uint32(0x800)) & np.uint32(0xFFFFF000)).tobytes()


class Trainer:
    """Trains a policy on batches.

    `comparison` is with the generators' model, before the first update; without one, the log-probs
    of the batches come from elsewhere.
    """

    def __init__(
        self, config: RunConfig, policy: Policy, comparison: StartComparison | None = None
    ) -> None:
        self.config, self.policy, self._comparison = config, policy, comparison
        self._fixed = FixedPolicies(config, policy)

    def train_step(self, batch: messages.Batch, step: int) -> messages.StepDone:
        """Train on one batch, the whole or this rank's part of it, after `step` steps; collective.

        Returns, on every rank, metrics of the whole batch and the probe's log-probs under the
        weights `step`; on rank 0 also the results of tokens. `wait_seconds` is 0.

        Raises:
            ValueError: arrays that don't fit together, or ids beyond the vocabulary.
            ConfigError: the generators have another model.
            FloatingPointError: loss or gradient norm is not finite. The weights are spoiled then;
                the last checkpoint and the last published version are not.
        """
        started = time.perf_counter()
        micro_batches, objective = self.prepare(batch, step)
        self.policy.forward_backward(micro_batches, objective)
        metrics, probe = report(batch, micro_batches, objective, self.policy)
        if self._comparison is not None:
            self._comparison.check(metrics, step)
        rate = learning_rate(self.config, step)
        norm = self.policy.apply(rate)
        metrics |= {"grad_norm": norm, "learning_rate": rate}
        if not np.isfinite([metrics["loss"], norm]).all():
            raise FloatingPointError(
                f"step {step}: loss {metrics['loss']} and gradient norm {norm}: not finite; look at"
                " ratio_max and the generator's log-probs of this batch"
            )
        ratios, entropies = token_results(batch, micro_batches, self.policy)
        return messages.StepDone(
            step=step,
            metrics=metrics,
            probe_logprobs=probe,
            wait_seconds=0.0,
            train_seconds=time.perf_counter() - started,
            ratios=ratios,
            entropies=entropies,
        )

    def prepare(self, batch: messages.Batch, step: int) -> tuple[list[MicroBatch], Objective]:
        """Return this rank's micro-batches with all log-probs they need, and their objective."""
        check_routed_experts(batch, self.policy)
        micro_batches = micro_batches_of(batch, self.policy)
        self._fixed.add_logprobs(micro_batches, step)
        return micro_batches, Objective(self.config.algorithm, old_is_current(self.config, step))


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the rate of a linear warm-up to a constant; step 0 has `1 / warmup_steps` of it."""
    o = config.optimizer
    return o.learning_rate * min(1.0, (step + 1) / max(1, o.warmup_steps))
