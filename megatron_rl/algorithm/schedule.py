"""The `schedule` section: sizes of a step, and how far generation runs ahead of training."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatron_rl.section import Section

DEFAULT_UPDATES_PER_PHASE = 8


class Schedule(Section):
    """How much is trained, and by which weights it was generated."""

    steps: PositiveInt = 1000
    """Optimizer steps of the run."""
    prompts_per_step: PositiveInt = 48
    """Prompts of one optimizer step, over all data-parallel ranks."""
    completions_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Completions generated for each prompt (the group size G)."""
    mode: Literal["pipeline", "ppo_off_policy", "synchronous"] = "pipeline"
    """PipelineRL-k: generators stream, and stay within `max_lag_steps`. PPO-off-policy-k: generate
    the batches of `updates_per_phase` steps, then train them. Synchronous: generate, train."""
    max_lag_steps: NonNegativeInt = 8
    """k: no token is trained that weights older than k optimizer steps made. Follows from the mode
    except in `pipeline`."""
    updates_per_phase: PositiveInt = 1
    """Optimizer steps for which one phase of `ppo_off_policy` generates (there, 8 by default)."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens of one micro-batch with its padding, at most (one sequence is always allowed)."""
    packing: bool = True
    """Micro-batches are rows of many sequences (packed), rather than one padded row for each; the
    gradient is the same."""

    @model_validator(mode="after")
    def _mode_fits(self) -> Self:
        phases = self.mode == "ppo_off_policy"
        given = self.model_fields_set
        if phases and "updates_per_phase" not in given:
            self.updates_per_phase = DEFAULT_UPDATES_PER_PHASE
        if self.updates_per_phase != 1 and not phases:
            raise ValueError(
                f"schedule.updates_per_phase is {self.updates_per_phase}: schedule.mode ="
                f" {self.mode!r} has no phases; use mode 'ppo_off_policy', or leave it out"
            )
        if self.mode == "pipeline":
            return self
        lag = self.updates_per_phase - 1
        if "max_lag_steps" not in given:
            self.max_lag_steps = lag
        if self.max_lag_steps != lag:
            why = f" with schedule.updates_per_phase = {self.updates_per_phase}" if phases else ""
            raise ValueError(
                f"schedule.max_lag_steps is {self.max_lag_steps}: schedule.mode ="
                f" {self.mode!r}{why} has a lag of at most {lag}; leave it out, or set it to that"
            )
        return self

    def phase_start(self, step: int) -> int:
        """First step of the phase that a step belongs to; the step itself without phases."""
        return step - step % self.updates_per_phase

    def oldest_version(self, step: int) -> int:
        """Oldest weights that may generate for a step: the one rule of all schedules.

        Example: pipeline with k = 8 takes versions from `step - 8` on; ppo_off_policy with k = 8
        takes version 8 for steps 8 to 15.
        """
        if self.mode == "pipeline":
            return step - self.max_lag_steps
        return self.phase_start(step)

    def phase_steps(self, step: int) -> int:
        """Steps whose batches must be complete before `step` is trained: its phase's, at its start.

        Example: 8 at step 8 and 1 at step 9 of ppo_off_policy with k = 8; 1 in other modes.
        """
        if step != self.phase_start(step):
            return 1
        return min(self.updates_per_phase, self.steps - step)

    def summary(self) -> str:
        """The schedule in a few words."""
        if self.mode == "pipeline":
            return f"PipelineRL-{self.max_lag_steps}"
        if self.mode == "synchronous":
            return "synchronous"
        return f"PPO-off-policy-{self.updates_per_phase}"
