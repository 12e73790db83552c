"""One RL step: a batch message in, one optimizer step and its metrics out.

The trainer computes `sum(loss_weight * term)` over the whole batch and nothing else; the
orchestrator has put every divisor into the loss weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl import messages
from megatron_rl.config import RunConfig
from megatron_rl.trainer import world
from megatron_rl.trainer.client import TrainerClient
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.reference import Anchors
from megatron_rl.trainer.shards import ModelShards
from megatron_rl.trainer.step_work import StepWork
from megatron_rl.weights.export import export_for_generators
from megatron_rl.weights.transports.base import Publisher


def learning_rate(config: RunConfig, step: int) -> float:
    """Linear warm-up to a constant; step 0 already learns (`1 / warmup_steps` of the rate)."""
    o = config.optimizer
    return o.learning_rate * min(1.0, (step + 1) / max(1, o.warmup_steps))


class Trainer:
    """Trains a policy on batches.

    Args:
        config: `algorithm`, `optimizer` and `schedule.micro_batch_tokens` count.
        policy: the model; its weights change.
    """

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self._anchors = Anchors(config, policy)

    def train_step(self, batch: messages.Batch, step: int) -> messages.StepDone:
        """Trains one batch; collective over the trainer ranks.

        Args:
            batch: the same on every rank.
            step: optimizer steps that were applied before.

        Returns:
            Metrics of the whole batch, and the probe's log-probs under the weights `step`; on
            every rank. `wait_seconds` is 0.

        Raises:
            ValueError: arrays that don't fit together, or ids beyond the vocabulary.
            FloatingPointError: loss or gradient norm is not finite. The weights are spoiled then;
                the last checkpoint and the last published version are not.
        """
        started = time.perf_counter()
        work = self.prepare(batch, step)
        outputs = self.policy.forward_backward(work.own, work.loss)
        rate = learning_rate(self.config, step)
        norm = self.policy.apply(rate)
        found, probe = work.report(outputs, self.policy.reports)
        found |= {"grad_norm": norm, "learning_rate": rate}
        if not np.isfinite([found["loss"], norm]).all():
            raise FloatingPointError(
                f"step {step}: loss {found['loss']} and gradient norm {norm}: not finite; look at"
                " ratio_max and the generator's log-probs of this batch"
            )
        return messages.StepDone(
            step=step,
            metrics=found,
            probe_logprobs=probe,
            wait_seconds=0.0,
            train_seconds=time.perf_counter() - started,
        )

    def prepare(self, batch: messages.Batch, step: int) -> StepWork:
        """What this rank has to do for a batch; see `train_step`."""
        algorithm, anchors = self.config.algorithm, self._anchors
        work = StepWork.of_batch(batch, step, self.policy, algorithm)
        logprobs = anchors.logprobs(work.own, len(work.sequences.token_ids), step)
        work.inputs = replace(
            work.inputs,
            old=logprobs.old,
            old_is_current=anchors.old_is_current(step),
            reference=logprobs.reference,
        )
        return work


def publish_weights(
    config: RunConfig,
    policy: ModelShards,
    client: TrainerClient | None,
    publisher: Publisher | None,
    version: int,
) -> float:
    """Seconds that the export of the current weights as `version` took; collective."""
    started = time.perf_counter()
    stream = export_for_generators(config, policy)
    manifest = None
    if publisher is not None:
        manifest = publisher.publish(version, stream, config.weights.bucket_bytes)
        if client is not None:  # only rank 0 knows which versions generators have released
            publisher.release(client.versions_needed_from - 1)
    seconds = time.perf_counter() - started
    if client is not None and manifest is not None:
        client.published(messages.Published(manifest=manifest, seconds=seconds))
    return seconds


def next_batch(
    client: TrainerClient | None, step: int, stop_requested: Callable[[], bool]
) -> tuple[messages.Batch, bool]:
    """(the batch, whether any rank is asked to stop), the same on every rank."""
    group = world.control_group()
    data = messages.encode(client.next_batch(step)) if client is not None else b""
    # One message agrees on both: the size is rank 0's, a stop is anybody's.
    header = torch.tensor([len(data), int(stop_requested())])
    dist.all_reduce(header, op=dist.ReduceOp.MAX, group=group)
    size, stop = header.tolist()
    if client is not None:
        buffer = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
    else:
        buffer = torch.empty(size, dtype=torch.uint8)
    dist.broadcast(buffer, src=0, group=group)
    batch = messages.decode(buffer.numpy().tobytes())
    if not isinstance(batch, messages.Batch):
        raise TypeError(f"step {step}: expected a Batch, received {type(batch).__name__}")
    return batch, bool(stop)
