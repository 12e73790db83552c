"""The fixed policies of a step: the old policy and the reference.

Source of the old log-probs (`algorithm.old_policy`):

- `generator`: the generator's own at sampling time.
- `trainer`, one update per phase: the current policy's, so that the ratio is 1 and the importance
  correction alone separates the generator's policy from it.
- `trainer`, k updates per phase: those of the weights at the phase's start, from a frozen copy.
  A run that is resumed within a phase no longer has that copy; it takes the generator's log-probs,
  which are of the same weights, until the next phase begins.

The reference (`algorithm.kl_coefficient`) is the start checkpoint. With `algorithm.kl_reset_steps`
it becomes the current policy at that interval, and is kept below `output_dir/reference`, so that a
resumed run continues with the right one.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.trainer import world
from megatron_rl.trainer.batch import MicroBatch
from megatron_rl.trainer.hf_checkpoint import save_huggingface
from megatron_rl.trainer.model import Policy

FOLDER = "reference"


def recomputes_old(config: RunConfig) -> bool:
    """Return True if the algorithm needs log-probs of earlier weights of the trainer."""
    return config.algorithm.old_policy == "trainer" and config.schedule.updates_per_phase > 1


def old_is_current(config: RunConfig, step: int) -> bool:
    """Return True if the old policy of this step is the current one, without its gradient."""
    a, begins = config.algorithm, step == config.schedule.phase_start(step)
    return a.loss.ratio_reference == "none" or (a.old_policy == "trainer" and begins)


class FrozenWeights:
    """A copy of a policy's weights, in their number format, on their device.

    It costs one extra copy of this rank's parameters and one extra forward pass per batch. There
    is no second module: the frozen weights replace the trained ones during the pass.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._weights = {name: p.data.clone() for name, p in policy.parameters.items()}

    def take(self) -> None:
        """Freeze the weights that the policy has now."""
        for name, p in self._policy.parameters.items():
            self._weights[name].copy_(p.data)

    def take_huggingface(self, directory: str | Path) -> None:
        """Freeze the weights of a Hugging Face directory of the same architecture.

        Raises:
            ValueError: names or shapes that differ from the architecture's.
        """
        self._swap()
        try:
            self._policy.load_huggingface(directory)
        finally:
            self._swap()

    def logprobs(self, micro_batches: list[MicroBatch]) -> list[Tensor | None]:
        """Return the log-probs [T] of each micro-batch under the frozen weights.

        Collective over the ranks of a model; None on other pipeline stages than the last.
        """
        self._swap()
        try:
            self._policy.forward_backward(micro_batches, None)
        finally:
            self._swap()
        return [micro.logprobs_T for micro in micro_batches]

    def _swap(self) -> None:
        for name, p in self._policy.parameters.items():
            trained = p.data.clone()
            p.data.copy_(self._weights[name])
            self._weights[name].copy_(trained)


class FixedPolicies:
    """The frozen policies that a run's algorithm needs; others cost nothing."""

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        self._config, self._policy = config, policy
        self._old: FrozenWeights | None = None
        self._reference: FrozenWeights | None = None

    def add_logprobs(self, micro_batches: list[MicroBatch], step: int) -> None:
        """Set the old and reference log-probs that the algorithm needs; collective over ranks."""
        if recomputes_old(self._config):
            if step == self._config.schedule.phase_start(step):
                self._old = self._old or FrozenWeights(self._policy)
                self._old.take()
            elif self._old is not None:
                logprobs = self._old.logprobs(micro_batches)
                for micro, logprobs_T in zip(micro_batches, logprobs, strict=True):
                    micro.old_logprobs_T = logprobs_T
        if self._config.algorithm.kl_coefficient:
            # The generator's experts are those of the policy, not of other weights.
            live = [replace(micro, experts_RLK=None) for micro in micro_batches]
            logprobs = self._reference_at(step).logprobs(live)
            for micro, logprobs_T in zip(micro_batches, logprobs, strict=True):
                micro.reference_logprobs_T = logprobs_T

    def _reference_at(self, step: int) -> FrozenWeights:
        every = self._config.algorithm.kl_reset_steps
        folder = self._config.output_dir / FOLDER
        if self._reference is None:
            if step == 0 and dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)  # of an older run in this folder
            dist.barrier(group=world.control_group())
            self._reference = FrozenWeights(self._policy)
            self._reference.take_huggingface(newest_before(folder, step) or self._policy.directory)
        if every is not None and step > 0 and step % every == 0:
            self._reference.take()
            save_huggingface(self._policy, _at(folder, step), self._policy.directory)
        return self._reference


def newest_before(folder: Path, step: int) -> Path | None:
    """Return the saved reference of the latest reset up to a step; None if there was none."""
    return max((p for p in folder.glob("step_??????") if p <= _at(folder, step)), default=None)


def _at(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"
