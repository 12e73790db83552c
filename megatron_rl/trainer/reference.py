"""The fixed policies of a step beside the trained one: the old policy, and the reference.

Where old log-probs come from (`algorithm.old_policy`):

- `generator`: the generator's own at sampling time; nothing is computed here.
- `trainer`, one update per phase: the current policy's, so that the ratio is 1 and the importance
  correction alone tells the generator's policy from it; nothing extra is computed.
- `trainer`, k updates per phase: those of the weights at the phase's start, from a frozen copy.
  A run that is resumed within a phase no longer has that copy; it takes the generator's log-probs,
  which are of the same weights, until the next phase begins.

The reference (`algorithm.kl_coefficient`) is the start checkpoint. With `algorithm.kl_reset_steps`
it becomes the current policy every so many steps; each such reference is kept below
`output_dir/reference/step_000100`, so that a resumed run goes on with the right one.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.trainer import world
from megatron_rl.trainer.batch import MicroBatch
from megatron_rl.trainer.frozen import FrozenWeights
from megatron_rl.trainer.hf_checkpoint import save_huggingface
from megatron_rl.trainer.model import Policy

FOLDER = "reference"


@dataclass(frozen=True, slots=True)
class AnchorLogprobs:
    """Log-probs by flat position of the step [N], on the CPU; None where none are needed."""

    old: Tensor | None
    reference: Tensor | None


def recomputes_old(config: RunConfig) -> bool:
    """Whether the algorithm needs log-probs of earlier weights of the trainer."""
    return config.algorithm.old_policy == "trainer" and config.schedule.updates_per_phase > 1


def old_is_current(config: RunConfig, step: int) -> bool:
    """Whether the old policy of this step is the current one, without its gradient."""
    a, s = config.algorithm, config.schedule
    if a.loss.against == "none":
        return True
    return a.old_policy == "trainer" and step == s.phase_start(step)


class Anchors:
    """The frozen policies that a run's algorithm asks for; none of them costs anything otherwise.

    Args:
        config: `algorithm`, `schedule` and `output_dir` count.
        policy: the trained policy, with its weights of any step.
    """

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        self._config, self._policy = config, policy
        self._recomputes = recomputes_old(config)
        self._old: FrozenWeights | None = None
        self._old_phase = -1
        self._reference: FrozenWeights | None = None

    def old_is_current(self, step: int) -> bool:
        """Whether the old policy of this step is the current one, without its gradient."""
        return old_is_current(self._config, step)

    def logprobs(self, batches: list[MicroBatch], tokens: int, step: int) -> AnchorLogprobs:
        """Log-probs of a step's completions; collective over the trainer ranks.

        Args:
            batches: micro-batches of this data-parallel rank.
            tokens: flat positions of the whole step.
            step: optimizer steps that are in the policy's weights.
        """
        old = reference = None
        if self._recomputes:
            phase = self._config.schedule.phase_start(step)
            if step == phase:
                self._freeze_old(phase)
            elif self._old is not None and self._old_phase == phase:
                old = self._old.logprobs(batches, tokens)
        if self._config.algorithm.kl_coefficient:
            # The generator's experts are those of the policy, not of other weights.
            live = [replace(micro, routes_RLK=None) for micro in batches]
            reference = self._reference_at(step).logprobs(live, tokens)
        return AnchorLogprobs(old, reference)

    def _freeze_old(self, phase: int) -> None:
        if self._old is None:
            self._old = FrozenWeights(self._policy)
        else:
            self._old.take()
        self._old_phase = phase

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
    """The saved reference of the latest reset up to a step; None when there was none."""
    kept = [p for p in sorted(folder.glob("step_??????")) if p <= _at(folder, step)]
    return kept[-1] if kept else None


def _at(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"
