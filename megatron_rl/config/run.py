"""The whole tree of one run, and the checks of values that depend on each other."""

import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from megatron_rl.algorithm.schedule import Schedule
from megatron_rl.algorithm.settings import Algorithm
from megatron_rl.config import sections
from megatron_rl.config.rollout_settings import RolloutSettings
from megatron_rl.config.tasks import ArithmeticTask, LookupTask, TaskChoice, named_tasks
from megatron_rl.rewards.verifier_settings import VerifierSettings
from megatron_rl.section import ConfigError, Section

TINY_MODELS = ("tiny_scout", "tiny_dense", "tiny_qwen3", "tiny_qwen3_moe")
_CONFIGS = Path(__file__).parents[1] / "models" / "configs"
NAMED_MODELS = tuple(sorted({path.stem for path in _CONFIGS.glob("*.json")} - {*TINY_MODELS}))
"""Published models whose config.json is in the package (`megatron_rl.models.named_config`)."""


class RunConfig(Section):
    """One run: its roles, model, task, algorithm and budgets."""

    recipe: str | None = None
    """Recipe whose values this configuration is based on (`megatron-rl recipes`)."""
    output_dir: Path = Path("runs/run")
    """Folder of metrics, checkpoints and the report."""
    seed: NonNegativeInt = 1234
    """Seed of data order, initial weights and sampling. With `schedule.mode: synchronous` and one
    engine, two runs with one seed on the same machine are equal, bit for bit, where no kernel's
    result depends on the batch or the order of sums (docs/algorithms.md). Other modes train what is
    ready, so their completions differ."""
    model: str = "tiny_scout"
    """A tiny model (`tiny_scout`, `tiny_dense`, `tiny_qwen3`, `tiny_qwen3_moe`), a Hugging Face
    directory, or the name of a published model: `smollm2-135m` after `megatron-rl model fetch
    smollm2-135m`, others (`llama-3.1-8b`, `llama-4-scout-17b-16e`, `qwen3-8b`, `qwen3-30b-a3b`)
    with `start_checkpoint` as its weights."""
    start_checkpoint: Path | None = None
    """Hugging Face directory of the initial weights; without it, a tiny model makes its own."""
    resume: bool | NonNegativeInt = False
    """Continue from the newest checkpoint in `output_dir`, or from that of a step; then checkpoints
    and metrics after it are moved aside."""
    roles: sections.Roles = sections.Roles()
    fleet: sections.Fleet = sections.Fleet()
    parallel: sections.Parallel = sections.Parallel()
    precision: sections.Precision = sections.Precision()
    kernels: sections.Kernels = sections.Kernels()
    tasks: dict[str, TaskChoice] = Field(default_factory=dict)
    """Tasks by name. A single task may be given as `task: {...}`; together with `tasks`, `task` has
    the keys that they share. A task whose name is a kind needs no `kind`."""
    sft: sections.SupervisedStage = sections.SupervisedStage()
    algorithm: Algorithm = Algorithm()
    schedule: Schedule = Schedule()
    generation: sections.Generation = sections.Generation()
    rollout: RolloutSettings = RolloutSettings()
    verifier: VerifierSettings = VerifierSettings()
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    evaluation: sections.Evaluation = sections.Evaluation()
    fit: sections.FitSettings = sections.FitSettings()
    weights: sections.Weights = sections.Weights()
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    metrics: sections.Metrics = sections.Metrics()
    timeouts: sections.Timeouts = sections.Timeouts()

    def seed_of(self, task: str) -> int:
        """Return the seed of a task's questions and of their split."""
        seed = self.tasks[task].seed
        return self.seed if seed is None else seed

    def task_key(self, task: str) -> str:
        """Return the key of a task in the configuration: `task` if it is the only one."""
        is_only = len(self.tasks) == 1 and self.tasks[task].kind == task
        return "task" if is_only else f"tasks.{task}"

    @property
    def begins_at_random(self) -> bool:
        """True for a tiny model without a given checkpoint."""
        return self.model in TINY_MODELS and self.start_checkpoint is None

    @property
    def made_start(self) -> Path | None:
        """Start directory that the run makes in its supervised stage; None if it makes none."""
        if not (self.begins_at_random or self.sft.first):
            return None
        base = self.start_checkpoint or Path(self.model)
        return self.output_dir / "start" / base.absolute().name

    @property
    def data_parallel(self) -> int:
        """Data-parallel size of the trainer."""
        p = self.parallel
        return self.roles.trainer_ranks // (p.tensor * p.pipeline * p.context)

    @property
    def generator_dtype(self) -> str:
        """Number format of the generators' parameters and activations: `fp32` or `bf16`."""
        return "bf16" if self.weights.dtype == "bf16" else self.precision.params

    @property
    def sequence_tokens(self) -> int:
        """Longest sequence: prompt, thinking, forced phrase and answer, or several turns."""
        g, r = self.generation, self.rollout
        # A token is at least one character, so the phrase's length bounds its tokens.
        turn = g.completion_tokens + len(g.interruption_phrase)
        single = g.max_prompt_tokens + turn
        if all(task.is_single_turn for task in self.tasks.values()):
            return single
        several = g.max_prompt_tokens + r.max_turns * (turn + r.tool_result_tokens)
        return max(single, r.max_tokens or several)

    def model_config_json(self) -> dict[str, Any]:
        """Return the `config.json` of the model; `ConfigError` if its directory has none."""
        own = Path(self.start_checkpoint or self.model) / "config.json"
        named = _CONFIGS / f"{self.model}.json"
        file = own if own.is_file() or not named.is_file() else named
        try:
            content: dict[str, Any] = json.loads(file.read_bytes())
        except (OSError, ValueError) as e:
            problem = f"{file}: {e}: give a Hugging Face directory"
            raise ConfigError(f"model: {problem}") from None
        return content

    def check_length(self) -> None:
        """Raise `ConfigError` for sequences that are longer than the model's positions."""
        content, g = self.model_config_json(), self.generation
        limit = content.get("text_config", content).get("max_position_embeddings")
        # The engine needs one more than the longest sequence.
        if limit is not None and self.sequence_tokens >= limit:
            raise ConfigError(
                f"a sequence may have {self.sequence_tokens} tokens, and model = {self.model!r} has"
                f" {limit} positions: lower generation.max_prompt_tokens = {g.max_prompt_tokens},"
                f" generation.thinking_budget_tokens = {list(g.thinking_budget_tokens)},"
                f" generation.answer_budget_tokens = {g.answer_budget_tokens} or the length of"
                f" generation.interruption_phrase ({len(g.interruption_phrase)} characters)"
            )

    @field_validator("resume", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """Read digits of the command line as a step, not as a truth value."""
        return int(value) if isinstance(value, str) and value.isdigit() else value

    @model_validator(mode="before")
    @classmethod
    def _task_or_tasks(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        rest = {key: value for key, value in values.items() if key != "task"}
        return {**rest, "tasks": named_tasks(values.get("task"), values.get("tasks"))}

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        p, r = self.parallel, self.roles
        known = (*TINY_MODELS, *NAMED_MODELS)
        if self.model not in known and not Path(self.model).is_dir():
            raise ValueError(
                f"model is {self.model!r}: neither one of {', '.join(known)} nor an existing"
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
        if r.one_gpu and (r.trainer_ranks, r.generator_ranks) != (1, 1):
            raise ValueError(
                f"roles.one_gpu is true: it takes one rank of each role, and roles.trainer_ranks ="
                f" {r.trainer_ranks}, roles.generator_ranks = {r.generator_ranks}; set both to 1,"
                " or set it false"
            )
        if p.virtual_pipeline > 1 and p.pipeline == 1:
            raise ValueError(
                f"parallel.virtual_pipeline is {p.virtual_pipeline}: it needs parallel.pipeline > 1"
                " (or set it to 1)"
            )
        if p.sequence_parallel and p.tensor == 1:
            raise ValueError(
                "parallel.sequence_parallel is true: it needs parallel.tensor > 1 (or set it false)"
            )
        self._generation_fits()
        self._tasks_fit()
        if self.weights.quantization == "fp8" and self.generator_dtype != "bf16":
            raise ValueError(
                "weights.quantization is 'fp8': precision.params = 'fp32' lets the generators"
                " compute in fp32, and vLLM's FP8 layers take bf16; set weights.dtype = 'bf16'"
            )
        self.algorithm = self.algorithm.resolved(self.generation.completion_tokens)
        return self

    def _generation_fits(self) -> None:
        g = self.generation
        low, high = g.thinking_budget_tokens
        if low > high:
            raise ValueError(
                f"generation.thinking_budget_tokens is ({low}, {high}): the first must not exceed"
                " the second"
            )
        if g.interruption == "none" and low != high:
            raise ValueError(
                f"generation.thinking_budget_tokens is ({low}, {high}): generation.interruption ="
                " 'none' never interrupts; give one number twice, or use 'phrase'"
            )
        if not g.interruption_phrase.endswith(g.think_end):
            raise ValueError(
                f"generation.interruption_phrase is {g.interruption_phrase!r}: it must end with"
                f" generation.think_end = {g.think_end!r}"
            )
        if self.evaluation.every_steps is None and self.evaluation.first_step > self.schedule.steps:
            raise ValueError(
                f"evaluation.first_step is {self.evaluation.first_step}: it must not exceed"
                f" schedule.steps = {self.schedule.steps}"
            )
        if max(self.metrics.token_dump_steps, default=-1) >= self.schedule.steps:
            raise ValueError(
                f"metrics.token_dump_steps is {self.metrics.token_dump_steps}: the steps of the run"
                f" are 0 to {self.schedule.steps - 1} (schedule.steps = {self.schedule.steps})"
            )

    def _tasks_fit(self) -> None:
        for name in self.evaluation.sets:
            if name in self.tasks or {*"./:"} & {*name}:
                raise ValueError(
                    f"evaluation.sets: the name {name!r} is that of a task, or has one of . / : in"
                    " it; take another"
                )
        pools = {name: task.train_prompts for name, task in self.tasks.items()}
        total = sum(n or 0 for n in pools.values())
        if None not in pools.values() and self.schedule.prompts_per_step > total:
            keys = " + ".join(f"{self.task_key(name)}.train_prompts" for name in pools)
            raise ValueError(
                f"schedule.prompts_per_step is {self.schedule.prompts_per_step}: {keys} = {total}"
                " has fewer prompts than one step"
            )
        for name, task in self.tasks.items():
            made = self.made_start is not None and self.sft.source is None
            if made and not isinstance(task, ArithmeticTask | LookupTask):
                raise ValueError(
                    f"{self.task_key(name)}.kind is {task.kind!r}: model = {self.model!r} makes its"
                    " start from demonstrations, and only 'arithmetic' and 'lookup' have them;"
                    " give a start_checkpoint without sft.first, rows as sft.source, or another"
                    " model"
                )
            if getattr(task, "verifier", "") == "custom" and self.verifier.custom is None:
                raise ValueError(
                    f"{self.task_key(name)}.verifier is 'custom': set verifier.custom to"
                    " `package.module:function`, or name the function here"
                )
        marker, verifier = self.generation.think_end, self.verifier
        if "think_end" not in verifier.model_fields_set:
            self.verifier = verifier.model_copy(update={"think_end": marker})
        elif verifier.think_end != marker:
            raise ValueError(
                f"verifier.think_end is {verifier.think_end!r}: it must be generation.think_end ="
                f" {marker!r}; leave it out"
            )
