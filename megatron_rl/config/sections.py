"""The sections of a run's configuration that belong to no algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_rl.section import Fraction, Section


class Roles(Section):
    """Which ranks of the one torchrun do what: trainers first, then generators."""

    trainer_ranks: PositiveInt = 2
    """Ranks of the Megatron world."""
    generator_ranks: PositiveInt = 1
    """Ranks that generate."""
    generator_tensor_parallel: PositiveInt = 1
    """Ranks of one vLLM engine; its first rank runs the engine, the others wait."""
    gpus_per_node: PositiveInt = 8
    """GPUs of a node, for plans: groups and engines that should not cross nodes."""
    gpu_gib: PositiveFloat = 80.0
    """Memory of a GPU in GiB, for plans."""
    generator_python: Path | None = None
    """Interpreter of the generator ranks, when vLLM lives in an environment of its own; the
    environment variable MEGATRON_RL_GENERATOR_PYTHON says the same for all runs of a machine."""

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
    virtual_pipeline: PositiveInt = 1
    """Model chunks of a pipeline stage, scheduled in turn (interleaved schedule)."""
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
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again instead of keeping them. `selective`: the
    inner activations of dense MLPs and shared experts, and on GPU norms and those of routed
    experts; `full`: all but the layers' inputs."""


class Precision(Section):
    """Number formats."""

    params: Literal["fp32", "bf16"] = "bf16"
    """Parameters and activations of trainer and generator."""
    logits: Literal["fp32", "tf32", "bf16"] = "fp32"
    """LM head of trainer and generator. `fp32`: products with fp32 results. `tf32`: those too, but
    the trainer may round fp32 operands (fp32 params, fp32 logit gradients) to TF32 on GPU. `bf16`:
    logits rounded to bf16, for comparisons."""
    logit_grads: Literal["auto", "bf16", "fp32"] = "auto"
    """Gradient by the logits in the two backward products of the trainer's LM head; `auto` is the
    type of `params`."""


class Kernels(Section):
    """How the trainer computes the loss over the LM head."""

    head: Literal["fused", "plain"] = "fused"
    """`fused`: chunk by chunk over tokens, without the logits of a micro-batch ever being there.
    `plain`: all of them, by autograd, for comparisons and tests."""
    chunk_mib: PositiveFloat | None = None
    """Memory for the fp32 logits of one chunk; default: 136 on CPU, 3175 on GPU."""


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
    """Marker that opens thinking, at the end of every prompt. Empty: the model opens it by itself,
    or does not think (then `interruption: none` and `verifier.math.ended_thinking: false`)."""
    think_end: Annotated[str, Field(min_length=1)] = "</think>"
    """Marker that closes thinking, of one or more tokens."""
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


class Evaluation(Section):
    """mean@n pass rate on the held-out prompts."""

    samples_per_prompt: PositiveInt = 16
    """Completions of each held-out prompt (the n of mean@n)."""
    points: Annotated[int, Field(ge=3)] = 12
    """Evaluations after the one at step 0, evenly spaced in the logarithm of compute."""
    first_step: PositiveInt = 8
    """Step of the first evaluation after step 0."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations, if they are to be evenly spaced; `points` and `first_step` do not
    count then."""


class Fit(Section):
    """The sigmoid that is fitted at the end of the run."""

    compute: Literal["tokens", "device_hours", "flops", "steps"] = "device_hours"
    """Measure of compute on the curve's axis."""


class Weights(Section):
    """Transfer of new weights to the generators."""

    transport: Literal["disk", "gloo", "nccl"] = "disk"
    """How the bytes travel: files that all nodes see, host memory over TCP, or GPU to GPU."""
    directory: Path | None = None
    """Shared folder of the disk transport; default: shared memory of this node."""
    bucket_bytes: PositiveInt = 256 * 2**20
    """Bytes gathered and sent at a time."""
    dtype: Literal["params", "bf16"] = "params"
    """Number format that travels and that the generators hold: that of `precision.params`, or
    bf16."""
    quantization: Literal["none", "fp8"] = "none"
    """Quantisation of the generators' linear layers: e4m3 with one scale per 128 x 128 block."""


class Checkpoint(Section):
    """Saved state of the run: Megatron's distributed checkpoint and the orchestrator's state."""

    every_steps: PositiveInt = 100
    """Steps between checkpoints; one is also written at the end and on an interrupt."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""


class Metrics(Section):
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
