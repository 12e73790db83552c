"""The `schedule` section: sizes of a step, and the lag of training behind generation."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatron_rl.section import Section


class Schedule(Section):
    """Sizes of a step, and the weights that generate it."""

    steps: PositiveInt = 1000
    """Optimizer steps of the run."""
    prompts_per_step: PositiveInt = 48
    """Prompts of one optimizer step, over all data-parallel ranks."""
    completions_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Completions generated for each prompt (the group size G)."""
    mode: Literal["pipeline", "ppo_off_policy", "synchronous"] = "pipeline"
    """`pipeline` (PipelineRL-k): generate continuously, within `max_lag_steps`. `ppo_off_policy`:
    generate the batches of `updates_per_phase` steps, then train them. `synchronous`: generate one
    batch, then train it."""
    max_lag_steps: NonNegativeInt = 8
    """k: no trained token is sampled with weights older than k optimizer steps. Set it for
    `pipeline` only; other modes determine it."""
    updates_per_phase: PositiveInt = 1
    """Optimizer steps of one phase of `ppo_off_policy` (8 by default in that mode)."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens of one micro-batch, padding included (one sequence is always allowed)."""
    packing: bool = True
    """Pack many sequences into one row of a micro-batch, instead of one padded row per sequence;
    the gradient is the same."""
    max_empty_batches: PositiveInt = 50
    """Batches in a row without anything to learn (no prompt has two rewards) after which the run
    ends. Each is skipped: it takes no optimizer step and publishes no weights."""

    @model_validator(mode="after")
    def _mode_fits(self) -> Self:
        phases, given = self.mode == "ppo_off_policy", self.model_fields_set
        if phases and "updates_per_phase" not in given:
            self.updates_per_phase = 8
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
        """Return the first step of a step's phase; the step itself without phases."""
        return step - step % self.updates_per_phase

    def oldest_version(self, step: int) -> int:
        """Return the oldest version that may generate for a step.

        Example: pipeline with k = 8 accepts versions from `step - 8`; ppo_off_policy with k = 8
        accepts version 8 for steps 8 to 15.
        """
        return step - self.max_lag_steps if self.mode == "pipeline" else self.phase_start(step)

    def phase_steps(self, step: int) -> int:
        """Return the number of steps whose batches must be complete before `step` is trained.

        Example: ppo_off_policy with k = 8 has 8 at step 8, where a phase starts, and 1 at step 9;
        other modes have 1.
        """
        starts = step == self.phase_start(step)
        return min(self.updates_per_phase, self.steps - step) if starts else 1

    def summary(self) -> str:
        """Return the schedule in a few words."""
        return {
            "pipeline": f"PipelineRL-{self.max_lag_steps}",
            "ppo_off_policy": f"PPO-off-policy-{self.updates_per_phase}",
        }.get(self.mode, self.mode)
