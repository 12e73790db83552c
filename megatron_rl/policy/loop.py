"""The trainer role: wait for a batch, train, publish; save when told to.

Per step v, with weights of version v:

    batch = next_batch(v)           rank 0 asks the orchestrator, all ranks get the bytes
    checkpoint of step v            if the batch says so, or the run is interrupted
    train_step -> step_done         the weights are v + 1 now
    export -> published             version v + 1, complete on disk before it is announced
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import messages
from megatron_rl.config import RunConfig
from megatron_rl.policy import checkpoint, world
from megatron_rl.policy.model import Policy
from megatron_rl.policy.shards import ModelShards
from megatron_rl.policy.supervised import save_huggingface
from megatron_rl.policy.trainer import Trainer
from megatron_rl.weights.export import export_for_generators

Publish = Callable[[int, Iterator[tuple[str, Tensor]]], messages.Manifest | None]
"""(version, stream) -> on rank 0 the manifest of the version, which is complete then."""


class Client(Protocol):
    """What the trainer says to the orchestrator, on rank 0; waits are bounded inside."""

    def next_batch(self, step: int) -> messages.Batch: ...

    def step_done(self, done: messages.StepDone) -> None: ...

    def published(self, published: messages.Published) -> None: ...

    def save_state(self, step: int, directory: str) -> None:
        """Returns when the orchestrator's state of `step` is written into `directory`."""

    def done(self, done: messages.TrainerDone) -> None: ...


def run_trainer(
    config: RunConfig,
    policy: Policy,
    client: Client | None,
    *,
    publish: Publish | None,
    start_step: int,
    stop_requested: Callable[[], bool],
) -> None:
    """Trains until a batch says stop, or any rank is asked to stop; collective.

    Args:
        config: the run.
        policy: with the weights of `start_step`.
        client: on rank 0; None elsewhere.
        publish: on the ranks that take part in publishing, rank 0 among them; None elsewhere.
        start_step: optimizer steps that are in the weights.
        stop_requested: whether this rank was interrupted; looked at before every step.
    """
    trainer = Trainer(config, policy)
    publish_seconds = publish_weights(config, policy, client, publish, start_step)
    step = start_step
    while True:
        waited = time.perf_counter()
        batch, interrupted = next_batch(client, step, stop_requested)
        waited = time.perf_counter() - waited
        if batch.save or batch.stop or interrupted:
            checkpoint.save(config, policy, step, _state_writer(client, step))
        if batch.stop or interrupted:
            break
        done = trainer.train_step(batch, step)
        if client is not None:
            client.step_done(
                messages.StepDone(
                    step=step,
                    metrics=done.metrics,
                    probe_logprobs=done.probe_logprobs,
                    wait_seconds=waited,
                    train_seconds=done.train_seconds,
                    publish_seconds=publish_seconds,
                )
            )
        step += 1
        publish_seconds = publish_weights(config, policy, client, publish, step)
    if not interrupted:
        save_huggingface(policy, config.output_dir / "final", policy.directory)
    if client is not None:
        client.done(messages.TrainerDone(step=step, interrupted=interrupted))


def publish_weights(
    config: RunConfig,
    policy: ModelShards,
    client: Client | None,
    publish: Publish | None,
    version: int,
) -> float:
    """Seconds that the export of the current weights as `version` took; collective."""
    started = time.perf_counter()
    stream = export_for_generators(config, policy)
    manifest = None if publish is None else publish(version, stream)
    seconds = time.perf_counter() - started
    if client is not None and manifest is not None:
        client.published(messages.Published(manifest=manifest, seconds=seconds))
    return seconds


def next_batch(
    client: Client | None, step: int, stop_requested: Callable[[], bool]
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


def _state_writer(client: Client | None, step: int) -> Callable[[str], None] | None:
    if client is None:
        return None
    return lambda directory: client.save_state(step, directory)
