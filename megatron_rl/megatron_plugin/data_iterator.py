"""The steps of a run in `pretrain`: what comes before a schedule, and the data iterator in it."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl import liveness, messages
from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.megatron_plugin.plugin_model import PluginModel
from megatron_rl.trainer.batch import check_routed_experts, micro_batches_of
from megatron_rl.trainer.client import TrainerClient
from megatron_rl.trainer.loss import HeadPass, Objective
from megatron_rl.trainer.publisher import Publisher
from megatron_rl.trainer.reference import old_is_current
from megatron_rl.trainer.start_comparison import StartComparison
from megatron_rl.trainer.step import next_batch, token_results
from megatron_rl.trainer.step_metrics import report


class PluginSteps:
    """The steps of this rank, shared by the iterators of its chunks; the client is on rank 0."""

    def __init__(
        self,
        config: RunConfig,
        model: PluginModel,
        client: TrainerClient | None,
        publisher: Publisher,
        start_step: int,
    ) -> None:
        self.config, self.model = config, model
        self.client, self._publisher = client, publisher
        self._comparison = StartComparison(model)
        self._step, self._published = start_step - 1, -1
        self.passes: list[HeadPass] = []

    @property
    def steps(self) -> int:
        """Optimizer steps that Megatron has made, or is about to finish."""
        return self._step + 1

    def begin(self, step: int, chunks: Sequence[Any]) -> None:
        """Publish the weights and fetch the batch of a step; collective, before its schedule.

        Within the schedule, pipeline stages reach their data iterators at different times. Megatron
        has made `step` optimizer steps, and wrapped the model as `chunks`.

        Raises:
            ConfigError: no more batches, or more micro-batches than Megatron makes of a step.
            OrchestratorGone: no batch in time.
        """
        config, model = self.config, self.model
        model.complete(chunks)
        self.publish(step)
        began = time.perf_counter()
        batch, _ = next_batch(self.client, step, lambda: False, model)
        self._started = time.perf_counter()
        if batch.stop:
            raise ConfigError(
                f"step {step}: the orchestrator has no more batches, and Megatron continues to"
                f" --train-iters; schedule.steps is {config.schedule.steps}"
            )
        check_routed_experts(batch, model)
        micro_batches = micro_batches_of(batch, model)
        model.check_count(len(micro_batches), step)
        model.divide_router_losses(int(messages.ints(batch.bounds)[-1]))
        self._objective = Objective(config.algorithm, old_is_current(config, step))
        vocabulary, objective = model.architecture.vocabulary, self._objective
        self.passes = [HeadPass(config, vocabulary, micro, objective) for micro in micro_batches]
        self._step, self._batch, self._wait_seconds = step, batch, self._started - began

    def publish(self, version: int) -> None:
        """Offer the weights to the generators, once per version; collective."""
        if version == self._published:
            return
        self._publisher.publish(version)
        self._published = version

    def finish(self, chunks: Sequence[Any]) -> None:
        """Publish the last weights, and wait until they are complete; collective."""
        self.model.complete(chunks)
        self.publish(self.steps)
        self._publisher.wait()

    def trained(self) -> None:
        """Report the step whose gradients are complete, before the update; collective.

        Raises:
            ConfigError: the generators have another model (`StartComparison`).
        """
        batch, micro_batches = self._batch, [each.micro for each in self.passes]
        metrics, probe = report(batch, micro_batches, self._objective, self.model)
        self._comparison.check(metrics, self._step)
        ratios, entropies = token_results(batch, micro_batches, self.model)
        if self.client is not None:
            done = messages.StepDone(
                step=self._step,
                metrics=metrics,
                probe_logprobs=probe,
                wait_seconds=self._wait_seconds,
                train_seconds=time.perf_counter() - self._started,
                ratios=ratios,
                entropies=entropies,
            )
            self.client.send(done)

    def save_state(self, directory: Path | None) -> dict[str, int]:
        """Save the orchestrator's state after the last step, into Megatron's iterator folder."""
        liveness.sign("saving", self.steps)
        if self.client is not None and directory is not None:
            folder = state_folder(directory, self.steps)
            folder.mkdir(parents=True, exist_ok=True)
            self.client.save_state(self.steps, str(folder))
        return {"step": self.steps}


def state_folder(directory: Path, step: int) -> Path:
    """Return the folder of the orchestrator's state of an iteration."""
    return directory / f"iter_{step:07d}" / "megatron_rl"


class MicroBatchIterator(Iterator[HeadPass]):
    """Iterator for Megatron's `--dataloader-type external`, one per model chunk."""

    def __init__(
        self, steps: PluginSteps, start_step: int, count: int, directory: Path | None
    ) -> None:
        self._steps, self._count, self._directory = steps, count, directory
        self._next = start_step * count

    def __next__(self) -> HeadPass:
        step, index = divmod(self._next, self._count)
        assert step + 1 == self._steps.steps
        self._next += 1
        return self._steps.passes[index]

    def save_state(self) -> dict[str, int]:
        """Save the orchestrator's state; Megatron calls this when it saves a checkpoint."""
        return self._steps.save_state(self._directory)


def loss_function(count: int) -> Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Return Megatron's loss function of one of `count` micro-batches: the sum, not divided."""
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)

    def summed(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        # Megatron logs sum(first) / sum(second) over micro-batches and ranks: the global sum.
        share = torch.tensor(1.0 / (ranks * count), device=loss.device)
        logged = torch.stack([loss.detach().float(), share])
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {"rl loss": logged}

    return summed
