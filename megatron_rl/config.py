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
    SettingsConfigDict,
    SettingsError,
)

from megatron_rl import recipes
from megatron_rl.algorithm.schedule import Schedule as Schedule
from megatron_rl.algorithm.settings import DEFAULT_KINDS
from megatron_rl.algorithm.settings import Algorithm as Algorithm
from megatron_rl.section import ConfigError as ConfigError
from megatron_rl.section import Fraction, sections_of
from megatron_rl.section import Section as Section

TINY_MODELS = ("tiny_scout", "tiny_dense")


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


class Generation(Section):
    """Sampling and forced-length interruption; token budgets are per completion."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer's log-probs use the same one."""
    top_p: float = 1.0
    """Nucleus sampling; 1 only: the trainer's log-probs are those of the whole distribution."""
    top_k: int = 0
    """Sampling from the k likeliest tokens; 0 (off) only, for the same reason."""
    min_p: float = 0.0
    """Least probability relative to the likeliest token; 0 (off) only, for the same reason."""
    interruption: Literal["phrase", "none"] = "phrase"
    """End thinking by a forced phrase when its budget is used up; with `none`, thinking and answer
    share one budget (the sum of both) and a completion that reaches it is truncated."""
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

    @property
    def completion_tokens(self) -> int:
        """Longest completion: thinking and answer, a forced phrase not counted."""
        return self.thinking_budget_tokens[1] + self.answer_budget_tokens

    @model_validator(mode="after")
    def _whole_distribution(self) -> Self:
        for key, value, off in (
            ("top_p", self.top_p, 1.0),
            ("top_k", self.top_k, 0),
            ("min_p", self.min_p, 0.0),
        ):
            if value != off:
                raise ValueError(
                    f"generation.{key} is {value:g}: it cuts the distribution that is sampled from,"
                    " while the trainer's log-probs are those of the whole one, so every ratio"
                    f" would be wrong; set it to {off:g} (generation.temperature is corrected for)"
                )
        return self


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
    seed: NonNegativeInt | None = None
    """Seed of the problems and of their split; default: the run's `seed`."""
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


SWITCH = {"true": True, "false": False}
"""What a switch may be said to be on the command line."""


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


def _flatten(error: ValidationError) -> str:
    lines = []
    for e in error.errors():
        loc = _without_kinds(e["loc"])
        key = ".".join(str(part) for part in loc) or "configuration"
        message = e["msg"].removeprefix("Value error, ")
        if e["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key (value {e['input']!r}); {_known_keys(e['loc'])}")
        elif e["type"] == "union_tag_invalid":
            lines.append(f"{key}.kind is {e['ctx']['tag']!r}: one of {e['ctx']['expected_tags']}")
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
    while len(loc) > 1 and not _sections(loc[:-1]):
        loc = loc[:-1]
    return f"{'.'.join(loc)}: unknown key (value {given!r}); {_known_keys(loc)}"


def _sections(loc: tuple[int | str, ...]) -> tuple[type[Section], ...]:
    """The sections that stand at a place of the tree; of a choice, the one that `loc` names."""
    found: tuple[type[Section], ...] = (RunConfig,)
    for part in loc:
        named = tuple(s for s in found if len(found) > 1 and _kind(s) == part)
        fields = [s.model_fields[str(part)] for s in found if part in s.model_fields]
        found = named or tuple(s for f in fields for s in sections_of(f.annotation))
    return found


def _kind(section: type[Section]) -> Any:
    return section.model_fields["kind"].default


def _without_kinds(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A place in the tree without the names of choices that pydantic puts into it."""
    return tuple(
        part
        for i, part in enumerate(loc)
        if not (len(above := _sections(loc[:i])) > 1 and part in map(_kind, above))
    )


def _known_keys(loc: tuple[int | str, ...]) -> str:
    above = _sections(loc[:-1])
    where = ".".join(str(part) for part in _without_kinds(loc[:-1])) or "the top level"
    kind = (
        f" of kind {_kind(above[0])}" if loc[-2:-1] and loc[-2] in map(_kind_or_none, above) else ""
    )
    known = dict.fromkeys(name for section in above for name in section.model_fields)
    return f"{where}{kind} has: {', '.join(known)}"


def _kind_or_none(section: type[Section]) -> Any:
    return _kind(section) if "kind" in section.model_fields else None


def _read_yaml(path: str | Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}: not valid YAML: {e}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(values).__name__}")
    return values


def _read_overrides(overrides: list[str]) -> dict[str, Any]:
    class _Settings(RunConfig, BaseSettings):
        model_config = SettingsConfigDict(
            extra="forbid",
            use_attribute_docstrings=True,
            cli_prog_name="megatron-rl train",
            cli_implicit_flags=True,
            cli_exit_on_error=False,
        )

    try:
        source = CliSettingsSource(_Settings, cli_parse_args=_command_line(overrides))  # type: ignore[var-annotated]
        return source()
    except SettingsError as e:
        raise ConfigError(_unrecognized(str(e))) from None


def _command_line(overrides: list[str]) -> list[str]:
    """The overrides as pydantic-settings reads them.

    `--algorithm.loss gspo` becomes `--algorithm.loss.kind gspo`, so that parameters may follow;
    a switch may have its value said, `--resume true` or `--resume=false`.
    """
    keys = {f"--{key}": kind for key, kind, *_ in describe()}
    choices = {key.removesuffix(".kind") for key in keys if key.endswith(".kind")}
    out: list[str] = []
    pending = [part for argument in overrides for part in _split_value(argument)]
    while pending:
        name = pending.pop(0)
        if keys.get(name) == "bool" and pending and pending[0].lower() in SWITCH:
            on = SWITCH[pending.pop(0).lower()]
            out.append(name if on else name.replace("--", "--no-", 1))
        else:
            out.append(f"{name}.kind" if name in choices else name)
    return out


def _split_value(argument: str) -> list[str]:
    return argument.split("=", 1) if argument.startswith("--") else [argument]


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> RunConfig:
    """The configuration of a recipe, with a YAML file on top, and command-line overrides on that.

    Args:
        path: YAML file, or None for the defaults; its key `recipe` names the recipe.
        overrides: `["--schedule.steps", "40", "--model=tiny_dense", "--recipe", "dapo"]`.

    Raises:
        ConfigError: unknown key, bad value, or values that don't fit together; the message names
            the key, the value and what would be right.
    """
    in_file = {} if path is None else _read_yaml(path)
    on_line = _read_overrides(overrides or [])
    recipe = on_line.get("recipe", in_file.get("recipe"))
    values: dict[str, Any] = {"algorithm": {k: {"kind": v} for k, v in DEFAULT_KINDS.items()}}
    if recipe is not None:
        values = recipes.merge(values, recipes.load(recipe).values)
    for layer in (in_file, on_line):
        values = recipes.merge(values, layer)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as e:
        raise ConfigError(_flatten(e)) from None


def describe(
    section: type[Section] = RunConfig, prefix: str = "", skip: str = ""
) -> list[tuple[str, str, str, str]]:
    """Every leaf key of the tree as (dotted key, type, default, help text).

    The parameters of a choice are listed for each kind that has them, with its name before the
    help text.
    """
    rows = []
    for name, field in section.model_fields.items():
        if name == skip:
            continue
        kind: Any = field.annotation
        inner = sections_of(kind)
        if len(inner) > 1:
            kinds = ", ".join(_kind(s) for s in inner)
            text = field.description or ""
            rows.append((f"{prefix}{name}.kind", kinds, repr(field.default.kind), text))
            for one in inner:
                leaves = describe(one, f"{prefix}{name}.", skip="kind")
                rows += [(k, t, d, f"[{_kind(one)}] {h}") for k, t, d, h in leaves]
            continue
        if inner:
            rows += describe(inner[0], f"{prefix}{name}.")
            continue
        shown = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind)
        shown = (shown or str(kind)).replace("typing.", "").replace("pathlib.", "")
        rows.append((prefix + name, shown, repr(field.default), field.description or ""))
    return rows
