"""The one typed configuration tree of a run.

It is read from a YAML file and dotted command-line overrides (`--schedule.steps 40`), imports
without torch, and refuses unknown keys, bad values and sizes that don't fit together. The help
text of a field is the string under it; units are in the names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

TINY_MODELS = ("tiny_scout", "tiny_dense")


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, the value and the remedy."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class Roles(Section):
    """Which ranks of the one torchrun do what: trainers first, then generators."""

    trainer_ranks: PositiveInt = 2
    """Ranks of the Megatron world."""
    generator_ranks: PositiveInt = 1
    """Ranks that generate."""
    generator_tensor_parallel: PositiveInt = 1
    """Ranks of one vLLM engine; its first rank runs the engine, the others wait."""

    @property
    def world_size(self) -> int:
        """Ranks that torchrun starts."""
        return self.trainer_ranks + self.generator_ranks

    @property
    def engines(self) -> int:
        """vLLM engines."""
        return self.generator_ranks // self.generator_tensor_parallel


class Parallel(Section):
    """Megatron's parallel sizes over the trainer ranks."""

    tensor: PositiveInt = 1
    """Tensor-parallel size."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size."""
    context: PositiveInt = 1
    """Context-parallel size."""
    expert: PositiveInt = 1
    """Expert-parallel size (divides the data-parallel ranks)."""
    expert_tensor: PositiveInt = 1
    """Tensor-parallel size inside an expert."""
    sequence_parallel: bool = False
    """Split activations along the sequence between tensor-parallel ranks."""
    distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks."""


class Precision(Section):
    """Number formats."""

    params: Literal["fp32", "bf16"] = "bf16"
    """Parameters and activations of trainer and generator."""
    logits: Literal["fp32", "params"] = "fp32"
    """LM-head products of trainer and generator: fp32 results, or those of `params`."""


class Algorithm(Section):
    """Loss, advantages and filters (ScaleRL's by default)."""

    loss: Literal["cispo"] = "cispo"
    """Policy loss."""
    max_ratio: PositiveFloat = 5.0
    """Cap on pi_train / pi_gen in ratio units (the paper's eps_max)."""
    aggregation: Literal["prompt", "sample", "token"] = "prompt"
    """What one loss is the mean over before the mean over the batch."""
    advantage_normalization: Literal["batch", "prompt", "none"] = "batch"
    """Which standard deviation divides the centred rewards."""
    zero_variance_filter: bool = True
    """Drop prompts whose completions all have one reward; they are not refilled."""
    no_positive_resampling: bool = True
    """Never draw a prompt again, in later epochs, once its pass rate reached the threshold."""
    no_positive_resampling_threshold: Fraction = 0.9
    """Pass rate from which a prompt is not drawn again."""
    no_positive_resampling_statistic: Literal["last", "mean"] = "last"
    """Pass rate of the last visit, or running mean over all visits."""


class Schedule(Section):
    """How much is trained, and how far generation runs ahead (PipelineRL-k)."""

    steps: PositiveInt = 1000
    """Optimizer steps of the run."""
    prompts_per_step: PositiveInt = 48
    """Prompts of one optimizer step, over all data-parallel ranks."""
    completions_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Completions generated for each prompt (the group size G)."""
    max_lag_steps: NonNegativeInt = 8
    """k: no token is trained that weights older than k optimizer steps made."""
    micro_batch_tokens: PositiveInt = 16384
    """Padded tokens of one micro-batch, at most (one sequence is always allowed)."""


class Generation(Section):
    """Sampling and forced-length interruption; token budgets are per completion."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer's log-probs use the same one."""
    max_prompt_tokens: PositiveInt = 2048
    """Longest prompt; a longer one is refused when the data are read."""
    thinking_budget_tokens: tuple[PositiveInt, PositiveInt] = (10240, 12288)
    """Thinking tokens after which the interruption phrase is forced: drawn from this range."""
    answer_budget_tokens: PositiveInt = 2048
    """Tokens left for the answer once thinking ended or was interrupted."""
    interruption_phrase: str = (
        "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    )
    """Text forced when the thinking budget is used up; ends with the end-of-thinking marker."""
    think_start: str = "<think>"
    """Marker that opens thinking; the last token of every prompt."""
    think_end: str = "</think>"
    """Marker that closes thinking."""
    concurrent_completions: PositiveInt = 256
    """Completions decoding at once on one engine."""
    kv_cache_gib: PositiveFloat = 1.0
    """Key-value cache of one engine on CPU (on GPU, `gpu_memory_fraction` counts)."""
    gpu_memory_fraction: Fraction = 0.85
    """Share of a GPU's memory that vLLM may use."""


class OptimizerConfig(Section):
    """AdamW with linear warm-up to a constant learning rate."""

    learning_rate: PositiveFloat = 5e-7
    """Learning rate after warm-up."""
    warmup_steps: NonNegativeInt = 100
    """Steps of linear warm-up."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-15
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    clip_grad_norm: PositiveFloat = 1.0
    """Largest global gradient norm."""


class SupervisedStage(Section):
    """The short supervised stage that makes the start checkpoint of a tiny model."""

    prompts: PositiveInt = 8000
    """Prompts with demonstrations (none of the held-out ones)."""
    demonstrations_per_prompt: PositiveInt = 2
    """Noisy demonstrations of each prompt."""
    steps: PositiveInt = 1600
    """Optimizer steps."""
    sequences_per_step: PositiveInt = 32
    """Demonstrations of one optimizer step."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate; cosine to a tenth of it."""
    warmup_steps: NonNegativeInt = 20
    """Steps of linear warm-up."""
    beta2: Fraction = 0.98
    """Decay of the second moment."""


class TaskConfig(Section):
    """The tiny arithmetic task, made on the spot."""

    name: Literal["arithmetic"] = "arithmetic"
    """Task."""
    train_prompts: PositiveInt = 6000
    """Size of the training pool."""
    heldout_prompts: PositiveInt = 96
    """Held-out prompts: in neither stage's training data."""
    operand_weights: tuple[float, ...] = (0.2, 0.4, 0.4)
    """Shares of expressions with 2, 3, 4 ... operands."""


class Evaluation(Section):
    """mean@n pass rate on the held-out prompts."""

    samples_per_prompt: PositiveInt = 16
    """Completions of each held-out prompt (the n of mean@n)."""
    points: Annotated[int, Field(ge=3)] = 12
    """Evaluations after the one at step 0, evenly spaced in the logarithm of compute."""
    first_step: PositiveInt = 8
    """Step of the first evaluation after step 0."""


class Fit(Section):
    """The sigmoid that is fitted at the end of the run."""

    compute: Literal["tokens", "device_hours", "flops", "steps"] = "device_hours"
    """Measure of compute on the curve's axis."""


class Weights(Section):
    """Transfer of new weights to the generators."""

    transport: Literal["disk"] = "disk"
    """How the bytes travel."""
    directory: Path | None = None
    """Shared folder of the disk transport; default: shared memory of this node."""
    bucket_bytes: PositiveInt = 256 * 2**20
    """Bytes gathered and sent at a time."""


class Checkpoint(Section):
    """Saved state of the run: Megatron's distributed checkpoint and the orchestrator's state."""

    every_steps: PositiveInt = 100
    """Steps between checkpoints; one is also written at the end and on an interrupt."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""


class Observe(Section):
    """Mirrors of metrics.jsonl, and the terminal view."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases mirror."""
    tensorboard: bool = False
    """TensorBoard mirror."""
    terminal: Literal["auto", "rich", "plain", "off"] = "auto"
    """Progress view; `auto` is rich on a terminal and plain elsewhere."""
    logprob_check_every_steps: PositiveInt = 10
    """Steps between checks of the trainer's log-probs against the generator's, same weights."""


class Timeouts(Section):
    """Every wait of the run is bounded by one of these."""

    startup_seconds: PositiveFloat = 900.0
    """Start of engines, models and process groups (and the supervised stage, per 100 steps)."""
    batch_seconds: PositiveFloat = 1800.0
    """The trainer's wait for a batch."""
    transfer_seconds: PositiveFloat = 300.0
    """One weight update."""
    evaluation_seconds: PositiveFloat = 3600.0
    """One evaluation."""
    shutdown_seconds: PositiveFloat = 25.0
    """Wait for a role to end after it was told to."""


class RunConfig(Section):
    """One run: its roles, model, task, algorithm and budgets."""

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
        return self


def _flatten(error: ValidationError) -> str:
    lines = []
    for e in error.errors():
        key = ".".join(str(part) for part in e["loc"]) or "configuration"
        message = e["msg"].removeprefix("Value error, ")
        if e["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key (value {e['input']!r}); {_known_keys(e['loc'])}")
        elif e["type"] == "value_error":
            lines.append(message)
        else:
            lines.append(f"{key} is {e['input']!r}: {message[0].lower()}{message[1:]}")
    return "\n".join(lines)


def _unrecognized(message: str) -> str:
    _, found, arguments = message.partition("unrecognized arguments: ")
    if not found:
        return f"command line: {message}"
    name, *value = arguments.split(" ")
    loc = tuple(name.lstrip("-").split("=")[0].split("."))
    given = " ".join(value) or name.partition("=")[2]
    while len(loc) > 1 and not _is_section(loc[:-1]):
        loc = loc[:-1]
    return f"{'.'.join(loc)}: unknown key (value {given!r}); {_known_keys(loc)}"


def _is_section(loc: tuple[int | str, ...]) -> bool:
    section: Any = RunConfig
    for part in loc:
        field = getattr(section, "model_fields", {}).get(part)
        section = field.annotation if field else None
    return hasattr(section, "model_fields")


def _known_keys(loc: tuple[int | str, ...]) -> str:
    section: Any = RunConfig
    for part in loc[:-1]:
        section = section.model_fields[part].annotation
    where = ".".join(str(part) for part in loc[:-1]) or "the top level"
    return f"{where} has: {', '.join(section.model_fields)}"


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> RunConfig:
    """The configuration of a YAML file with dotted command-line overrides on top.

    Args:
        path: YAML file, or None for the defaults.
        overrides: `["--schedule.steps", "40", "--model=tiny_dense"]`.

    Raises:
        ConfigError: unknown key, bad value, or sizes that don't fit together; the message names
            the key, the value and what would be right.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = yaml.safe_load(Path(path).read_text()) or {}
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such configuration file") from None
        except yaml.YAMLError as e:
            raise ConfigError(f"{path}: not valid YAML: {e}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected a mapping of keys, found {type(values).__name__}")

    class _Settings(RunConfig, BaseSettings):
        model_config = SettingsConfigDict(
            extra="forbid",
            use_attribute_docstrings=True,
            nested_model_default_partial_update=True,
            cli_prog_name="megatron-rl train",
            cli_implicit_flags=True,
            cli_exit_on_error=False,
        )

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            cli = CliSettingsSource(settings_cls, cli_parse_args=overrides or [])  # type: ignore[var-annotated]
            return cli, InitSettingsSource(settings_cls, init_kwargs=values)

    try:
        merged = _Settings()
    except ValidationError as e:
        raise ConfigError(_flatten(e)) from None
    except SettingsError as e:
        raise ConfigError(_unrecognized(str(e))) from None
    return RunConfig.model_validate(merged.model_dump())


def describe(
    section: type[Section] = RunConfig, prefix: str = ""
) -> list[tuple[str, str, str, str]]:
    """Every leaf key of the tree as (dotted key, type, default, help text)."""
    rows = []
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            rows += describe(kind, f"{prefix}{name}.")
            continue
        shown = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind)
        shown = (shown or str(kind)).replace("typing.", "").replace("pathlib.", "")
        rows.append((prefix + name, shown, repr(field.default), field.description or ""))
    return rows
