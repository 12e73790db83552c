"""The sections of a run's configuration that do not belong to the algorithm."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.section import Fraction, Section


class Roles(Section):
    """Division of the ranks of one torchrun: trainers first, then generators."""

    trainer_ranks: PositiveInt = 2
    """Ranks that train (Megatron's world)."""
    trainer_threads: PositiveInt | None = None
    """CPU threads of a trainer rank; null: OMP_NUM_THREADS, or one without it. Engines keep
    theirs."""
    generator_ranks: NonNegativeInt = 1
    """Ranks that generate; 0: all generators join by themselves (`megatron-rl generate --join`)."""
    generator_tensor_parallel: PositiveInt = 1
    """Tensor-parallel ranks of one vLLM engine; the first one runs the engine, the others wait."""
    one_gpu: bool = False
    """Trainer and generator share one GPU; `generation.gpu_memory_fraction` is the generator's
    part."""
    gpus_per_node: PositiveInt = 8
    """GPUs of a node; used by `megatron-rl plan` to keep groups and engines within nodes."""
    gpu_gib: PositiveFloat = 80.0
    """Memory of a GPU in GiB; used by `megatron-rl plan`."""
    host_gib: PositiveFloat = 1907.0
    """Memory of a node's host in GiB (2,048 GB); used by `megatron-rl plan`."""
    generator_python: Path | None = None
    """Python interpreter of the generator ranks, if vLLM has its own environment. The environment
    variable MEGATRON_RL_GENERATOR_PYTHON sets it for all runs of a machine."""

    @property
    def world_size(self) -> int:
        """Number of ranks that torchrun starts."""
        return self.trainer_ranks + self.generator_ranks

    @property
    def devices(self) -> int:
        """Number of GPUs of the run, or of ranks where there is none."""
        return 1 if self.one_gpu else self.world_size

    @property
    def engines(self) -> int:
        """Number of vLLM engines."""
        return self.generator_ranks // self.generator_tensor_parallel


class Fleet(Section):
    """Generators that come and go, and what is done when a process is lost."""

    port: NonNegativeInt = 0
    """Port of the orchestrator for `megatron-rl generate --join HOST:PORT`; 0: any free one, which
    `--join OUTPUT_DIR` finds."""
    generator_restarts: NonNegativeInt = 3
    """Times within ten minutes that an engine which torchrun's ranks started is restarted."""
    trainer_restarts: NonNegativeInt = 3
    """Times that the trainer's ranks are restarted, where the command starts torchrun itself;
    else that is torchrun's `--max-restarts`."""
    group_attempts: PositiveInt = 3
    """Losses of a generator after which a prompt that was in work there each time is dropped."""
    report_tokens: PositiveInt = 256
    """Tokens after which a generator tells how a completion goes on; if it is lost, another one
    continues from there."""


class Parallel(Section):
    """Megatron's parallel sizes over the trainer ranks."""

    tensor: PositiveInt = 1
    """Tensor-parallel size."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks of one pipeline stage (interleaved schedule)."""
    context: PositiveInt = 1
    """Context-parallel size."""
    expert: PositiveInt = 1
    """Expert-parallel size; it divides the data-parallel ranks."""
    expert_tensor: PositiveInt = 1
    """Tensor-parallel size of a single expert."""
    sequence_parallel: bool = False
    """Split activations along the sequence over the tensor-parallel ranks."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce the gradients of a bucket of layers over the data-parallel ranks during the backward
    pass of the others, not all of them after it."""
    overlap_param_gather: bool = False
    """Gather the sharded optimizer's new parameters in the background, up to where they are read:
    in the layers of the next pass, or by the export of weights. Needs `distributed_optimizer` and
    `overlap_grad_reduce`."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes. `selective`: the inner activations of dense
    MLPs and shared experts, and on GPU also norms and routed experts. `full`: everything but the
    inputs of the layers."""

    @model_validator(mode="after")
    def _gather_is_sharded(self) -> Self:
        possible = self.overlap_grad_reduce and self.distributed_optimizer
        if self.overlap_param_gather and not possible:
            raise ValueError(
                "parallel.overlap_param_gather is true: it needs parallel.distributed_optimizer and"
                " parallel.overlap_grad_reduce (or set it false)"
            )
        return self


class Precision(Section):
    """Number formats."""

    params: Literal["fp32", "bf16"] = "bf16"
    """Parameters and activations of trainer and generator."""
    logits: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Logits of trainer and generator. `fp32`: matrix products with fp32 results. `tf32`: as
    `fp32`, but on GPU the trainer may round fp32 operands to TF32. `bf16`: logits rounded to bf16,
    for comparisons."""
    generator_logits: Literal["fp32", "bf16"] | None = None
    """Logits of the generators where they differ from the trainer's, to compare runs with an fp32
    head on one side only; default: as `logits`."""
    logit_grads: Literal["auto", "bf16", "fp32"] = "auto"
    """Logit gradients in the two backward products of the trainer's LM head; `auto` is the format
    of `params`."""

    @property
    def generator_head(self) -> Literal["fp32", "bf16"]:
        """Logits of the generators; TF32 is for the trainer's products of fp32 operands."""
        return self.generator_logits or ("bf16" if self.logits == "bf16" else "fp32")


class Kernels(Section):
    """Computation of the loss over the LM head in the trainer."""

    head: Literal["fused", "plain"] = "fused"
    """`fused`: logits exist for one chunk of tokens at a time. `plain`: all logits of a micro-batch
    exist at once and autograd differentiates them, for comparisons and tests."""
    chunk_mib: PositiveFloat | None = None
    """Memory for the fp32 logits of one chunk; default: 136 on CPU, 3175 on GPU."""


class Generation(Section):
    """Sampling and forced-length interruption; token budgets are per completion."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by the same value."""
    interruption: Literal["phrase", "none"] = "phrase"
    """`phrase`: force the end of thinking when its budget is used up. `none`: thinking and answer
    share one budget (the sum of both), and a completion that reaches it is truncated."""
    max_prompt_tokens: PositiveInt = 2048
    """Longest prompt; a longer one is an error unless the task has `drop_long_prompts`."""
    thinking_budget_tokens: tuple[PositiveInt, PositiveInt] = (10240, 12288)
    """Range from which the number of thinking tokens before the interruption is drawn."""
    answer_budget_tokens: PositiveInt = 2048
    """Tokens for the answer after thinking has ended or was interrupted."""
    interruption_phrase: str = (
        "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    )
    """Text that is forced at the interruption; it ends with `think_end`."""
    think_start: str = "<think>"
    """Marker that opens thinking, at the end of every prompt. Empty if the model opens thinking
    itself, or does not think (then set `interruption: none` and
    `verifier.math.ended_thinking: false`)."""
    think_end: Annotated[str, Field(min_length=1)] = "</think>"
    """Marker that closes thinking, of one or more tokens."""
    concurrent_completions: PositiveInt = 256
    """Completions that one engine decodes at the same time."""
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache of one engine on CPU; on GPU, `gpu_memory_fraction` sets it."""
    gpu_memory_fraction: Fraction = 0.85
    """Fraction of a GPU's memory for vLLM."""

    @property
    def completion_tokens(self) -> int:
        """Longest completion: thinking and answer, without a forced phrase."""
        return self.thinking_budget_tokens[1] + self.answer_budget_tokens


class OptimizerConfig(Section):
    """AdamW with linear warm-up to a constant learning rate."""

    learning_rate: PositiveFloat = 5e-7
    """Learning rate after warm-up."""
    warmup_steps: NonNegativeInt = 100
    """Steps of linear warm-up."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.999
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-15
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    clip_grad_norm: PositiveFloat = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it."""


class SupervisedStage(Section):
    """Supervised stage before the run (`megatron-rl sft`); a tiny model's makes its own start."""

    first: bool = False
    """Begin `train` with this stage, from `start_checkpoint` or `model`; the run starts from its
    result. A tiny model without a given checkpoint always does."""
    source: str | None = None
    """Rows of prompt and response, or of `messages`: a file (jsonl, parquet, csv, json, arrow), a
    folder of such files or of `save_to_disk`, or a name on the hub. Without it, the model learns
    from noisy demonstrations of its arithmetic tasks, which are in words for all but tiny ones."""
    split: str = "train"
    """Split of the source; in a folder, the files whose names begin with it."""
    subset: str | None = None
    """Configuration name on the hub, or subfolder of a folder."""
    revision: str | None = None
    """Commit on the hub; pin it, or the data may change under a run."""
    prompt_field: str = ""
    """Field of the prompt, a text or turns; empty: one of the usual names."""
    response_field: str = ""
    """Field of the response, a text or a turn; empty: one of the usual names."""
    against: tuple[str, ...] = ()
    """Evaluation sets that no row may overlap with, as in `data prepare --against`; the held-out
    questions of the tasks are added to them."""
    shuffle_rows: PositiveInt = 16384
    """Rows in memory, of which the next one is drawn; a smaller source is shuffled as a whole."""
    max_sequence_tokens: PositiveInt = 12288
    """Longest prompt and response together; longer rows are dropped and counted."""
    prompts: PositiveInt = 8000
    """Prompts with demonstrations; none of them is held out."""
    demonstrations_per_prompt: PositiveInt = 2
    """Noisy demonstrations of each prompt."""
    steps: PositiveInt = 1600
    """Optimizer steps."""
    tokens_per_step: PositiveInt = 800
    """Largest batch of an optimizer step, prompts included."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate, followed by a cosine."""
    final_rate_fraction: Fraction = 0.1
    """Part of the peak at which the cosine ends; 1 keeps the rate constant after warm-up."""
    warmup_steps: NonNegativeInt = 20
    """Steps of linear warm-up."""
    beta2: Fraction = 0.98
    """Decay of the second moment."""


class EvaluationSet(Section):
    """Further questions to evaluate on, with a curve of their own."""

    source: str
    """A name, a local copy or a table as for `megatron-rl evaluate --data`: `aime2025`,
    `math500=copies/math500`, `problems.jsonl`. With dates, the questions with a `contest_date` in
    this range: `livecodebench@2025-01-01..2025-06-30`."""
    every_steps: PositiveInt
    """Steps between evaluations; there is also one at the end."""
    samples_per_prompt: PositiveInt = 16
    """Completions of each question."""
    verifier: str = "math"
    """Verifier of a table's rows without a field `kind`."""


class Evaluation(Section):
    """Evaluations: mean@n pass rate on the held-out prompts, and on further sets."""

    samples_per_prompt: PositiveInt = 16
    """Completions of each held-out prompt (the n of mean@n)."""
    points: Annotated[int, Field(ge=3)] = 12
    """Evaluations after the one at step 0, evenly spaced in the logarithm of compute."""
    first_step: PositiveInt = 8
    """Step of the first evaluation after step 0."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations; if set, it replaces `points` and `first_step`."""
    engine_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the engines that evaluate, at least one; the others go on with the training prompts
    and load newer weights."""
    sets: dict[str, EvaluationSet] = Field(default_factory=dict)
    """Evaluation sets by name, each with its own interval; the fit of the run is without them."""


class FitSettings(Section):
    """Fit of the sigmoid at the end of the run."""

    compute: Literal[
        "train_tokens", "train_device_hours", "train_flops", "tokens", "device_hours", "flops",
        "steps",
    ] = "train_device_hours"  # fmt: skip
    """Measure of compute: training without evaluations (`train_`), all that ran, or steps."""


class Weights(Section):
    """Transfer of new weights to the generators."""

    directory: Path | None = None
    """Folder that all nodes see, for versions; default: shared memory of each node."""
    bucket_bytes: PositiveInt = 64 * 2**20
    """Bytes that are gathered, taken and compared at a time."""
    dtype: Literal["params", "bf16"] = "params"
    """Number format of the transferred weights and of the generators: that of `precision.params`,
    or bf16."""
    quantization: Literal["none", "fp8"] = "none"
    """Quantization of the generators' linear layers: e4m3 with one scale per 128 x 128 block."""


class Checkpoint(Section):
    """Saved state of the run: Megatron's distributed checkpoint and the orchestrator's state."""

    every_minutes: PositiveFloat = 10.0
    """Minutes after which the next step begins with a checkpoint: a fault costs this much work."""
    every_steps: PositiveInt = 100
    """Steps that are multiples of this begin with one, too; one is also written at the end and on
    an interrupt."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep; the disk must have space for one more."""
    keep_every: PositiveInt | None = None
    """Write and keep the checkpoints of steps that are multiples of this, too."""

    def is_due(self, step: int, seconds: float) -> bool:
        """Return True if a step begins with a checkpoint, `seconds` after the one before."""
        multiples = self.every_steps, self.keep_every or self.every_steps
        return seconds >= 60 * self.every_minutes or any(step % n == 0 for n in multiples)


class Metrics(Section):
    """Mirrors of metrics.jsonl, and progress on the terminal."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases mirror."""
    tensorboard: bool = False
    """TensorBoard mirror."""
    terminal: Literal["plain", "off"] = "plain"
    """Progress on the terminal: a line every ten seconds, or none."""
    samples_every_steps: NonNegativeInt = 100
    """Steps between those of which a right and a wrong completion are shown on the terminal, in
    wandb and in TensorBoard; 0: none are."""
    logprob_check_every_steps: PositiveInt = 10
    """Steps between comparisons of trainer and generator log-probs at the same weights."""
    max_logprob_error: PositiveFloat | None = None
    """Mean difference in nats of these log-probs above which a run stops, before the update if it
    is seen in the batch itself; default: 0.001 for fp32 on CPU, else 0.1."""
    token_dump_steps: tuple[NonNegativeInt, ...] = ()
    """Steps whose trained tokens are written with ratio and log-probs to `tokens` in `output_dir`,
    40 bytes per token."""
    rollouts_every_steps: NonNegativeInt = 1
    """Steps between those whose completions are written to `rollouts` in `output_dir`; evaluations
    are written, too, unless it is 0."""
    rollouts_ratios: bool = True
    """Write ratio and entropy of each trained token to `rollouts`, too: 3 bytes per token; rank 0
    collects them after the update, 12 bytes per token."""
    rollouts_gib: PositiveFloat = 20.0
    """Disk of the files of steps in `rollouts`: the oldest are removed; all evaluations
    are kept."""

    def records(self, step: int) -> bool:
        """Return True if the completions of a step are written."""
        every = self.rollouts_every_steps
        return every > 0 and step % every == 0


class Timeouts(Section):
    """Limits of every wait in the run."""

    startup_seconds: PositiveFloat = 900.0
    """Start of engines, models and process groups (and the supervised stage, per 100 steps)."""
    batch_seconds: PositiveFloat = 1800.0
    """Wait of the trainer for a batch."""
    transfer_seconds: PositiveFloat = 300.0
    """One weight update."""
    peer_seconds: PositiveFloat = 10.0
    """Silence after which a store takes a version from another peer."""
    evaluation_seconds: PositiveFloat = 3600.0
    """One evaluation."""
    shutdown_seconds: PositiveFloat = 25.0
    """Wait for a role to end after it was asked to stop."""
    silence_seconds: PositiveFloat = 30.0
    """Silence after which a generator is lost: its prompts go to others. A trainer rank is named
    then, and after four times as long the trainer's ranks are restarted."""
    rejoin_seconds: PositiveFloat = 900.0
    """Wait of generators, with their weights and cache, for a run whose trainer is gone."""

    @property
    def hang_seconds(self) -> float:
        """Silence after which a process is ended and started again: four `silence_seconds`."""
        return 4 * self.silence_seconds
