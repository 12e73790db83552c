"""One RL step: a batch message in, one optimizer step and its metrics out.

The trainer computes `sum(loss_weight * term)` over the whole batch and nothing else; the
orchestrator has put every divisor into the loss weights.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from megatron_rl import messages
from megatron_rl.config import RunConfig
from megatron_rl.policy.anchors import Anchors
from megatron_rl.policy.model import Policy
from megatron_rl.policy.step import StepWork


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
