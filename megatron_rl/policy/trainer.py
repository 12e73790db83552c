"""One RL step: a batch message in, one optimizer step and its metrics out.

The trainer computes `sum(loss_weight * term)` over the whole batch and nothing else; the
orchestrator has put every divisor into the loss weights.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl import messages
from megatron_rl.algorithm.losses.base import Tokens
from megatron_rl.algorithm.objective import Sums, objective
from megatron_rl.config import RunConfig
from megatron_rl.policy import metrics, world
from megatron_rl.policy.anchors import Anchors
from megatron_rl.policy.microbatch import MicroBatch, Sequences, micro_batches
from megatron_rl.policy.model import Policy


def learning_rate(config: RunConfig, step: int) -> float:
    """Linear warm-up to a constant; step 0 already learns (`1 / warmup_steps` of the rate)."""
    o = config.optimizer
    return o.learning_rate * min(1.0, (step + 1) / max(1, o.warmup_steps))


def same_version_tokens(sequences: Sequences, versions: NDArray[np.int32], step: int) -> Tensor:
    """Which tokens [N] were sampled, like all the sampled ones of their sequence, by `step`.

    Forced tokens have version -1: they are not counted, and don't break their sequence.
    """
    sampled = versions >= 0
    other = (sampled & (versions != step)).astype(np.int64)
    others = np.add.reduceat(other, sequences.bounds[:-1]) if len(other) else other
    return torch.from_numpy(sampled & (np.repeat(others, sequences.lengths) == 0))


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
        sequences = Sequences.of_batch(batch)
        self._check_ids(sequences, step)
        arrays = {
            name: torch.from_numpy(messages.floats(getattr(batch, name)).copy())
            for name in ("advantages", "generator_logprobs", "loss_weights")
        }
        rank, ranks = self.policy.data_parallel
        own = micro_batches(
            sequences,
            rank,
            ranks,
            self.config.schedule.micro_batch_tokens,
            self.policy.row_multiple,
        )
        anchors = self._anchors.logprobs(own, len(sequences.token_ids), step)
        number = torch.from_numpy(np.repeat(np.arange(len(sequences.lengths)), sequences.lengths))
        found_sums: list[Sums] = []

        def term(logprobs_T: Tensor, entropy_T: Tensor, micro: MicroBatch) -> Tensor:
            def own_part(flat: Tensor) -> Tensor:
                return flat[micro.source_T].to(logprobs_T.device)

            generator_T = own_part(arrays["generator_logprobs"])
            old_T = generator_T
            if self._anchors.old_is_current(step):
                old_T = logprobs_T.detach()
            elif anchors.old is not None:
                old_T = own_part(anchors.old)
            tokens = Tokens(
                logprobs_T=logprobs_T,
                generator_logprobs_T=generator_T,
                old_logprobs_T=old_T,
                advantages_T=own_part(arrays["advantages"]),
                loss_weights_T=own_part(arrays["loss_weights"]),
                sequences_T=own_part(number),
                sequences=len(sequences.lengths),
                entropy_T=entropy_T,
                reference_logprobs_T=(
                    None if anchors.reference is None else own_part(anchors.reference)
                ),
            )
            sums = objective(self.config.algorithm, tokens)
            found_sums.append(sums._replace(loss=sums.loss.detach()))
            return sums.loss

        outputs = self.policy.forward_backward(own, term)
        rate = learning_rate(self.config, step)
        norm = self.policy.apply(rate)
        same = same_version_tokens(sequences, messages.ints(batch.versions), step)
        found, probe = self._metrics(batch, sequences, arrays, same, own, outputs, found_sums)
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

    def _check_ids(self, sequences: Sequences, step: int) -> None:
        ids, vocabulary = sequences.token_ids, self.policy.architecture.vocabulary
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
            raise ValueError(
                f"the batch of step {step} has token ids {ids.min()} to {ids.max()}: the model's"
                f" vocabulary is 0 to {vocabulary - 1}; tokenizer and model don't belong together"
            )

    def _metrics(
        self,
        batch: messages.Batch,
        sequences: Sequences,
        arrays: dict[str, Tensor],
        same: Tensor,
        own: list[MicroBatch],
        outputs: list[tuple[Tensor, Tensor]],
        objective_sums: list[Sums],
    ) -> tuple[dict[str, float], list[list[float]]]:
        """Metrics of the whole batch, and the probe's log-probs, on every rank."""
        positions = [sequences.completion_positions(i) for i in batch.probe]
        flat = np.concatenate([np.zeros(0, dtype=np.int64), *positions])
        probe = torch.zeros(len(flat), dtype=torch.float64)
        sums = torch.zeros(len(metrics.SUMS), dtype=torch.float64)
        maxima = torch.zeros(2, dtype=torch.float64)
        if self.policy.reports:
            source_T = torch.cat([micro.source_T for micro in own])
            logprobs_T = torch.cat([logprobs for logprobs, _ in outputs]).cpu()
            tokens = metrics.TokenArrays(
                logprobs=logprobs_T,
                entropy=torch.cat([entropy for _, entropy in outputs]).cpu(),
                generator_logprobs=arrays["generator_logprobs"][source_T],
                loss_weights=arrays["loss_weights"][source_T],
                same_version=same[source_T],
            )
            sums, maxima = metrics.local_sums(tokens, objective_sums)
            if len(flat):
                by_position = torch.zeros(len(sequences.token_ids), dtype=torch.float64)
                by_position[source_T] = logprobs_T.double()
                probe = by_position[torch.from_numpy(flat)]
        metrics.reduce_sums(sums, maxima, probe, world.control_group())
        lengths = [len(p) for p in positions]
        named = metrics.named(sums, maxima)
        if self.config.algorithm.correction.kind == "none":
            del named["corrected_fraction"]
        if not self.config.algorithm.kl_coefficient:
            del named["kl_reference"]
        return named, [part.tolist() for part in probe.split(lengths)]
