"""The data iterator: at the first micro-batch of a step, weights go out and a batch comes in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl import messages
from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.megatron_plugin.plugin_model import PluggedModel
from megatron_rl.trainer.batch import MicroBatch
from megatron_rl.trainer.client import TrainerClient
from megatron_rl.trainer.head import Head, HeadLoss, HeadRows
from megatron_rl.trainer.reference import old_is_current
from megatron_rl.trainer.router_replay import Routing
from megatron_rl.trainer.step import next_batch, publish_weights
from megatron_rl.trainer.step_work import StepWork
from megatron_rl.weights.transports.base import Publisher

STATE_FOLDER = "megatron_rl"

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class PluggedMicroBatch:
    """What `forward_step` gets from the iterator."""

    micro: MicroBatch
    loss: HeadLoss
    temperature: float
    head: Head
    routing: Routing | None
    count: int
    """Micro-batches of the step on this rank."""
    keep: Callable[[HeadRows], None]
    """Takes what the head found, on the last stage."""


@dataclass(slots=True)
class _Step:
    work: StepWork
    started: float
    waited: float
    outputs: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Rollouts:
    """The steps of this rank, shared by the iterators of its model chunks.

    Args:
        config: the run.
        model: the script's.
        client: to the orchestrator, on rank 0; None elsewhere.
        publish: this rank's end of the weight transport, if it has one.
        start_step: optimizer steps that Megatron has made.
        whole: called before an export.
    """

    def __init__(
        self,
        config: RunConfig,
        model: PluggedModel,
        client: TrainerClient | None,
        publisher: Publisher | None,
        start_step: int,
        whole: Callable[[], None],
    ) -> None:
        self._config, self._model, self._whole = config, model, whole
        self._client, self._publisher = client, publisher
        self._step = start_step - 1
        self._current: _Step | None = None
        self._published = -1
        self._publish_seconds = 0.0
        self._head: Head | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps that Megatron has made, or is about to finish."""
        return self._step + 1

    def micro_batch(self, step: int, index: int) -> PluggedMicroBatch:
        """Micro-batch `index` of `step`; the first call of a step is collective.

        Raises:
            ConfigError: more micro-batches than Megatron makes of a step.
            OrchestratorGone: no batch in time.
        """
        if step != self._step:
            self._advance(step)
        current = self._current
        assert current is not None
        assert self._head is not None
        own = current.work.own

        def keep(rows: HeadRows) -> None:
            current.outputs.append(rows.found)

        return PluggedMicroBatch(
            micro=own[index],
            loss=current.work.loss(own[index]),
            temperature=self._config.generation.temperature,
            head=self._head,
            routing=self._model.routing,
            count=len(own),
            keep=keep,
        )

    def _advance(self, step: int) -> None:
        config, model = self._config, self._model
        if self._head is None:
            self._head = Head.of(config, model.architecture.vocabulary)
        self.publish(step)
        waited = time.perf_counter()
        batch, _ = next_batch(self._client, step, lambda: False)
        waited = time.perf_counter() - waited
        if batch.stop:
            raise ConfigError(
                f"step {step}: the orchestrator has no more batches, and Megatron goes on to"
                f" --train-iters; schedule.steps is {config.schedule.steps}"
            )
        started = time.perf_counter()
        work = StepWork.of_batch(batch, step, model, config.algorithm)
        work.inputs = replace(work.inputs, old_is_current=old_is_current(config, step))
        model.check_count(len(work.own), step)
        self._step, self._current = step, _Step(work, started, waited)

    def publish(self, version: int) -> None:
        """Offer the weights to the generators, once per version; collective."""
        if version == self._published:
            return
        self._whole()
        self._publish_seconds = publish_weights(
            self._config, self._model, self._client, self._publisher, version
        )
        self._published = version

    def trained(self) -> None:
        """The gradients of the step are there: report it; collective."""
        current = self._current
        if current is None:
            return
        found, probe = current.work.report(current.outputs, self._model.reports)
        self._current = None
        if self._client is not None:
            self._client.step_done(
                messages.StepDone(
                    step=self._step,
                    metrics=found,
                    probe_logprobs=probe,
                    wait_seconds=current.waited,
                    train_seconds=time.perf_counter() - current.started,
                ),
                current.waited,
                self._publish_seconds,
            )

    def save_state(self, directory: Path | None) -> dict[str, int]:
        """The orchestrator's state after the last step, below Megatron's folder of iterators.

        Args:
            directory: where; None on ranks other than 0.
        """
        step = self.steps
        if self._client is not None and directory is not None:
            folder = state_folder(directory, step)
            folder.mkdir(parents=True, exist_ok=True)
            self._client.save_state(step, str(folder))
        return {"step": step}


def state_folder(directory: Path, step: int) -> Path:
    """Where the orchestrator's state of an iteration lies, beside the iterators' files."""
    return directory / f"iter_{step:07d}" / STATE_FOLDER


class RolloutIterator(Iterator[PluggedMicroBatch]):
    """What Megatron's `--dataloader-type external` takes, one per model chunk.

    Args:
        rollouts: the steps.
        start_step: iteration of the first micro-batch.
        count: micro-batches of a step.
        directory: for `save_state`; None where nothing is saved.
    """

    def __init__(
        self, rollouts: Rollouts, start_step: int, count: int, directory: Path | None
    ) -> None:
        self._rollouts, self._count, self._directory = rollouts, count, directory
        self._next = start_step * count

    def __next__(self) -> PluggedMicroBatch:
        step, index = divmod(self._next, self._count)
        found = self._rollouts.micro_batch(step, index)
        self._next += 1
        return found

    def save_state(self) -> dict[str, int]:
        """Called by Megatron when it saves a checkpoint."""
        return self._rollouts.save_state(self._directory)


def loss_of(batch: PluggedMicroBatch, rows: HeadRows) -> LossFunction:
    """Megatron's loss function of a micro-batch: its summed loss, divided by nothing.

    Args:
        batch: the micro-batch.
        rows: of its forward pass.
    """

    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)

    def summed(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        batch.keep(rows)
        # Megatron logs sum(first) / sum(second) over micro-batches and ranks: the global sum.
        share = torch.tensor(1.0 / (ranks * batch.count), device=loss.device)
        logged = torch.stack([loss.detach().float(), share])
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {"rl loss": logged}

    return summed
