"""What a trainer rank has to do for one batch, and what it reports of it.

`Trainer` (the own loop) and the plug-in for Megatron's `pretrain` share it.

Shape legend: N flat positions of the step, T completion tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl import messages
from megatron_rl.algorithm.settings import Algorithm
from megatron_rl.trainer import step_metrics, world
from megatron_rl.trainer.batch import MicroBatch, Sequences
from megatron_rl.trainer.head import HeadLoss
from megatron_rl.trainer.inputs import StepInputs
from megatron_rl.trainer.router_replay import Routing
from megatron_rl.trainer.shards import ModelShards


def same_version_tokens(sequences: Sequences, versions: NDArray[np.int32], step: int) -> Tensor:
    """Which tokens [N] were sampled, like all the sampled ones of their sequence, by `step`.

    Forced tokens have version -1: they are not counted, and don't break their sequence.
    """
    sampled = versions >= 0
    other = (sampled & (versions != step)).astype(np.int64)
    others = np.add.reduceat(other, sequences.bounds[:-1]) if len(other) else other
    return torch.from_numpy(sampled & (np.repeat(others, sequences.lengths) == 0))


@dataclass(slots=True, kw_only=True)
class StepWork:
    """One batch on one trainer rank."""

    algorithm: Algorithm
    batch: messages.Batch
    """The same on every rank."""
    step: int
    """Optimizer steps that were applied before."""
    sequences: Sequences
    inputs: StepInputs
    own: list[MicroBatch]
    """Of this rank."""
    routing: Routing | None
    """This rank's routers, where they are compared with the generator's."""

    @classmethod
    def of_batch(
        cls, batch: messages.Batch, step: int, shards: ModelShards, algorithm: Algorithm
    ) -> StepWork:
        """The work that needs no log-probs but the generator's.

        Raises:
            ValueError: arrays that don't fit together, or ids beyond the vocabulary.
        """
        sequences = Sequences.of_batch(batch, shards.architecture)
        if len(sequences.token_ids) and (sequences.routes_NLK is None) != (shards.routing is None):
            raise ValueError(
                f"the batch of step {step} has {len(batch.routes)} bytes of routes, and"
                f" algorithm.routing_replay is {shards.run.algorithm.routing_replay!r}: all roles"
                " need one configuration"
            )
        ids, vocabulary = sequences.token_ids, shards.architecture.vocabulary
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
            raise ValueError(
                f"the batch of step {step} has token ids {ids.min()} to {ids.max()}: the model's"
                f" vocabulary is 0 to {vocabulary - 1}; tokenizer and model don't belong together"
            )
        arrays = {
            name: torch.from_numpy(messages.floats(getattr(batch, name)).copy())
            for name in ("advantages", "generator_logprobs", "loss_weights")
        }
        lengths = sequences.lengths
        inputs = StepInputs(
            **arrays,
            sequence_of=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
            sequences=len(lengths),
            old=None,
            old_is_current=False,
            reference=None,
            add_over_ranks=shards.add_over_context,
        )
        return cls(
            algorithm=algorithm,
            batch=batch,
            step=step,
            sequences=sequences,
            inputs=inputs,
            own=shards.micro_batches(sequences),
            routing=shards.routing,
        )

    def loss(self, micro: MicroBatch) -> HeadLoss:
        """The objective of one of `own`."""
        return self.inputs.of(micro, world.device()).loss(self.algorithm)

    def report(
        self, outputs: list[tuple[Tensor, Tensor]], counts: bool
    ) -> tuple[dict[str, float], list[list[float]]]:
        """Metrics of the whole batch, and the probe's log-probs; collective over trainer ranks.

        Args:
            outputs: (log-probs [T], entropies [T]) of each of `own`.
            counts: whether this rank's outputs count in sums over the world.

        Returns:
            The same on every rank.
        """
        positions = [self.sequences.completion_positions(i) for i in self.batch.probe]
        flat = np.concatenate([np.zeros(0, dtype=np.int64), *positions])
        probe = torch.zeros(len(flat), dtype=torch.float64)
        sums = torch.zeros(len(step_metrics.SUMS), dtype=torch.float64)
        maxima = torch.zeros(2, dtype=torch.float64)
        if counts:
            source_T = torch.cat([micro.source_T for micro in self.own])
            logprobs_T = torch.cat([logprobs for logprobs, _ in outputs]).cpu()
            same = same_version_tokens(
                self.sequences, messages.ints(self.batch.versions), self.step
            )
            tokens = step_metrics.TokenArrays(
                logprobs=logprobs_T,
                entropy=torch.cat([entropy for _, entropy in outputs]).cpu(),
                generator_logprobs=self.inputs.generator_logprobs[source_T],
                loss_weights=self.inputs.loss_weights[source_T],
                same_version=same[source_T],
            )
            objective_sums = [
                self.inputs.of(micro, world.device()).sums(self.algorithm, *output)
                for micro, output in zip(self.own, outputs, strict=True)
            ]
            sums[: len(step_metrics.TOKEN_SUMS)], maxima = step_metrics.local_sums(
                tokens, objective_sums
            )
            if len(flat):
                by_position = torch.zeros(len(self.sequences.token_ids), dtype=torch.float64)
                by_position[source_T] = logprobs_T.double()
                probe = by_position[torch.from_numpy(flat)]
        if self.routing is not None:
            sums[len(step_metrics.TOKEN_SUMS) :] = self.routing.take_counts()
        step_metrics.reduce_sums(sums, maxima, probe, world.control_group())
        named = step_metrics.named(sums, maxima)
        if self.routing is not None:
            named |= step_metrics.named_routes(sums)
        if self.algorithm.correction.kind == "none":
            del named["corrected_fraction"]
        if not self.algorithm.kl_coefficient:
            del named["kl_reference"]
        return named, [part.tolist() for part in probe.split([len(p) for p in positions])]
