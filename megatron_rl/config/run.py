"""The whole tree of one run, and what must fit together in it."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import NonNegativeInt, model_validator

from megatron_rl.algorithm.schedule import Schedule
from megatron_rl.algorithm.settings import Algorithm
from megatron_rl.config.sections import (
    Checkpoint,
    Evaluation,
    Fit,
    Generation,
    Observe,
    OptimizerConfig,
    Parallel,
    Precision,
    Roles,
    SupervisedStage,
    TaskConfig,
    Timeouts,
    Weights,
)
from megatron_rl.section import Section

TINY_MODELS = ("tiny_scout", "tiny_dense")


class RunConfig(Section):
    """One run: its roles, model, task, algorithm and budgets."""

    recipe: str | None = None
    """Recipe whose values are the base of this configuration (`megatron-rl recipes`)."""
    output_dir: Path = Path("runs/run")
    """Folder of metrics, checkpoints and the report."""
    seed: NonNegativeInt = 1234
    """Seed of data order, initial weights and sampling."""
    model: str = "tiny_scout"
    """`tiny_scout`, `tiny_dense`, or a Hugging Face model directory."""
    start_checkpoint: Path | None = None
    """Hugging Face directory to start from; a tiny model makes its own when it is missing."""
    resume: bool = False
    """Go on from the newest checkpoint in `output_dir`."""
    roles: Roles = Roles()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    task: TaskConfig = TaskConfig()
    sft: SupervisedStage = SupervisedStage()
    algorithm: Algorithm = Algorithm()
    schedule: Schedule = Schedule()
    generation: Generation = Generation()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: Evaluation = Evaluation()
    fit: Fit = Fit()
    weights: Weights = Weights()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    timeouts: Timeouts = Timeouts()

    @property
    def task_seed(self) -> int:
        """Seed of the problems and of their split."""
        return self.seed if self.task.seed is None else self.task.seed

    @property
    def data_parallel(self) -> int:
        """Data-parallel size of the trainer."""
        p = self.parallel
        return self.roles.trainer_ranks // (p.tensor * p.pipeline * p.context)

    @property
    def sequence_tokens(self) -> int:
        """Longest sequence: prompt, thinking, forced phrase and answer."""
        g = self.generation
        # A token is at least one character, so the phrase's length bounds its tokens.
        phrase = len(g.interruption_phrase)
        thinking = g.thinking_budget_tokens[1]
        return g.max_prompt_tokens + thinking + phrase + g.answer_budget_tokens

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        p, r, s, g = self.parallel, self.roles, self.schedule, self.generation
        if self.model not in TINY_MODELS and not Path(self.model).is_dir():
            raise ValueError(
                f"model is {self.model!r}: neither one of {', '.join(TINY_MODELS)} nor an existing"
                " Hugging Face directory"
            )
        model_ranks = p.tensor * p.pipeline * p.context
        if r.trainer_ranks % model_ranks:
            raise ValueError(
                f"roles.trainer_ranks is {r.trainer_ranks}: it must be a multiple of"
                f" parallel.tensor x parallel.pipeline x parallel.context = {model_ranks}"
            )
        expert_ranks = p.expert * p.expert_tensor * p.pipeline
        if r.trainer_ranks % expert_ranks:
            raise ValueError(
                f"parallel.expert is {p.expert}: parallel.expert x parallel.expert_tensor x"
                f" parallel.pipeline = {expert_ranks} must divide roles.trainer_ranks ="
                f" {r.trainer_ranks}"
            )
        if r.generator_ranks % r.generator_tensor_parallel:
            raise ValueError(
                f"roles.generator_ranks is {r.generator_ranks}: it must be a multiple of"
                f" roles.generator_tensor_parallel = {r.generator_tensor_parallel}"
            )
        if p.sequence_parallel and p.tensor == 1:
            raise ValueError(
                "parallel.sequence_parallel is true: it needs parallel.tensor > 1 (or set it false)"
            )
        low, high = g.thinking_budget_tokens
        if low > high:
            raise ValueError(
                f"generation.thinking_budget_tokens is ({low}, {high}): the first must not exceed"
                " the second"
            )
        if g.interruption == "none" and low != high:
            raise ValueError(
                f"generation.thinking_budget_tokens is ({low}, {high}): generation.interruption ="
                " 'none' interrupts at no position; give one number twice, or use 'phrase'"
            )
        if not g.interruption_phrase.endswith(g.think_end):
            raise ValueError(
                f"generation.interruption_phrase is {g.interruption_phrase!r}: it must end with"
                f" generation.think_end = {g.think_end!r}"
            )
        if self.evaluation.first_step > s.steps:
            raise ValueError(
                f"evaluation.first_step is {self.evaluation.first_step}: it must not exceed"
                f" schedule.steps = {s.steps}"
            )
        if s.prompts_per_step > self.task.train_prompts:
            raise ValueError(
                f"schedule.prompts_per_step is {s.prompts_per_step}: task.train_prompts ="
                f" {self.task.train_prompts} has fewer prompts than one step"
            )
        self.algorithm = self.algorithm.resolved(g.completion_tokens)
        return self
