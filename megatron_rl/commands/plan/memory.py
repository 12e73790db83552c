"""Bytes of a trainer rank, and whether a layout fits.

By pipeline stage; P parameters of the rank (dense Pd, expert Pe), b bytes of a
parameter (bf16: 2):

    parameters  b P                     gradients  4 P: Megatron's buffer is fp32
    optimizer   (12 in bf16: fp32 copy and two moments; 8 in fp32) x (Pd / copies + Pe / copies of
                an expert) with the distributed optimizer, x P without
    logits      fp32, one chunk of tokens of the fused head, on the last stage, with what it returns

Activations follow the counting of "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198, section 4: what each operator keeps for backward), for what these models are:
RMS norms, grouped queries, attention that keeps no score matrix (FlashAttention), gated MLPs, no
dropout, and experts with evenly spread tokens (times `EXPERT_IMBALANCE`). Bytes per token and
layer, with t tensor-parallel ranks and s = t under sequence parallelism, else 1:

    4 H b / s                       inputs and outputs of both norms
    (2 n + 2 g) d b / t + 4 n / t   query, key, value, context; the softmax's log-sum
    3 F b / t                       gate, up, their product (dense MLP, shared expert)
    k (2 H b e + 3 Fe b) / s        a token's k experts: input, output, inner (e: expert tensor)
    8 E / s                         logits and probabilities of the router

`recompute: full` keeps H b / s per layer and one layer's rest at a time; `selective` drops the
inner activations (3 F, of experts the product Fe). A stage holds as many micro-batches at once as
stages come after it, itself included (1F1B; interleaved as in section 4.2.3 of the paper).
The formulas are estimates, and `Assumptions` says what they leave out; parameters are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_rl.commands.plan.generator_memory import (
    GIB,
    Assumptions,
    GeneratorMemory,
    generator_memory,
    generator_misfits,
)
from megatron_rl.commands.plan.layout import Layout
from megatron_rl.commands.plan.parameter_count import Count, count_stages
from megatron_rl.config import RunConfig

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

EXPERT_IMBALANCE = 1.25
"""Tokens of the busiest expert rank relative to an even spread."""
HEAD_CHUNK_BYTES = 3175 * 2**20
"""Default of `kernels.chunk_mib` on GPU."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a trainer rank of one pipeline stage."""

    stage: int
    count: Count
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    transfer: float

    @property
    def total(self) -> float:
        """All of it, without the reserve."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.transfer


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a layout, and whether it fits."""

    stages: tuple[StageMemory, ...]
    generator: GeneratorMemory
    misfits: tuple[str, ...] = field(default=())
    """Why it does not fit; empty: it does."""

    @property
    def worst(self) -> StageMemory:
        """The stage with the fullest ranks."""
        return max(self.stages, key=lambda stage: stage.total)


def estimate(
    run: RunConfig, layout: Layout, architecture: Architecture, assumed: Assumptions
) -> Memory:
    """Memory of a layout that divides the model.

    Args:
        run: number formats, token budgets and chunk sizes; its own layout does not count.
        layout: parallel sizes.
        architecture: the model.
        assumed: the device.
    """
    stages = trainer_memory(run, layout, architecture)
    generator = generator_memory(run, layout.generator_tensor, architecture, assumed)
    misfits = [*trainer_misfits(stages, assumed), *generator_misfits(generator)]
    return Memory(stages, generator, tuple(misfits))


def trainer_memory(
    run: RunConfig, layout: Layout, architecture: Architecture
) -> tuple[StageMemory, ...]:
    """Memory of a trainer rank, by pipeline stage."""
    counts = enumerate(count_stages(architecture, layout))
    return tuple(_stage(run, layout, architecture, count, stage) for stage, count in counts)


def trainer_misfits(stages: tuple[StageMemory, ...], assumed: Assumptions) -> list[str]:
    """Why trainer ranks don't fit."""
    worst, room = max(stages, key=lambda s: s.total), assumed.gpu_gib - assumed.reserve_gib
    if worst.total <= room * GIB:
        return []
    return [
        f"trainers: {worst.total / GIB:.1f} GiB on a rank of stage {worst.stage} and"
        f" {room:.1f} GiB are there ({assumed.gpu_gib:g} less {assumed.reserve_gib:g} of"
        f" reserve); {_largest(worst)}"
    ]


def micro_batch_tokens(run: RunConfig, layout: Layout) -> int:
    """Tokens of a micro-batch on one context-parallel rank, at most."""
    return math.ceil(max(run.schedule.micro_batch_tokens, run.sequence_tokens) / layout.context)


def _largest(stage: StageMemory) -> str:
    parts = {
        name: getattr(stage, name)
        for name in ("parameters", "gradients", "optimizer", "activations", "logits")
    }
    named = sorted(parts.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in named)


def _stage(
    run: RunConfig, layout: Layout, architecture: Architecture, count: Count, stage: int
) -> StageMemory:
    bf16 = run.precision.params == "bf16"
    width = 2 if bf16 else 4
    shares = layout.distributed_optimizer and layout.copies > 1
    dense, expert = (layout.copies, layout.expert_copies) if shares else (1, 1)
    last = stage == layout.pipeline - 1
    tokens = micro_batch_tokens(run, layout)
    columns = -(-architecture.vocabulary // layout.tensor)
    chunk = run.kernels.chunk_mib
    budget = HEAD_CHUNK_BYTES if chunk is None else chunk * 2**20
    if run.kernels.head == "plain":
        budget = math.inf
    # Beside the chunk: the gathered hidden states and their gradient, in `params` and summed fp32.
    logits = min(budget, 4.0 * tokens * columns) + tokens * architecture.hidden * (2 * width + 4)
    return StageMemory(
        stage,
        count,
        parameters=width * count.total,
        gradients=4 * count.total,
        optimizer=(12 if bf16 else 8) * (count.dense / dense + count.expert / expert),
        activations=_activations(run, layout, architecture, tokens, stage, width),
        logits=logits if last else 0.0,
        transfer=2 * run.weights.bucket_bytes,
    )


@dataclass(frozen=True, slots=True)
class _LayerActivations:
    """Bytes per token of one layer."""

    kept: float
    """What recomputation of any kind leaves: the input."""
    outer: float
    inner: float
    """What `selective` drops as well as `full`."""


def _layer(
    layout: Layout, architecture: Architecture, moe: bool, width: int, shared: int
) -> _LayerActivations:
    a, fields = architecture, architecture.config_fields()
    t, s = layout.tensor, layout.tensor if layout.sequence_parallel else 1
    kept = a.hidden * width / s
    heads = (2 * a.heads + 2 * a.groups) * a.head_dim * width / t + 4 * a.heads / t
    outer = 3 * kept + heads
    if not moe:
        return _LayerActivations(kept, outer, 3 * fields["ffn_hidden_size"] * width / t)
    wide = fields["moe_ffn_hidden_size"] * width / s
    routed = a.experts_per_token * EXPERT_IMBALANCE
    outer += 8 * a.experts / s
    outer += routed * (2 * a.hidden * width * layout.expert_tensor / s + 2 * wide)
    return _LayerActivations(kept, outer, routed * wide + 3 * shared * width / t)


def _activations(
    run: RunConfig,
    layout: Layout,
    architecture: Architecture,
    tokens: int,
    stage: int,
    width: int,
) -> float:
    """Bytes that a rank of a stage keeps for backward, at its fullest."""
    fields = architecture.config_fields()
    frequency = fields.get("moe_layer_freq", 1)
    shared = fields.get("moe_shared_expert_intermediate_size") or 0
    stages, chunks = layout.pipeline, layout.virtual_pipeline
    # A stage's layers are alike enough that their mean stands for each of them.
    if isinstance(frequency, list) and architecture.experts:
        moe_share = sum(frequency) / len(frequency)
    else:
        moe_share = 1.0 if architecture.experts else 0.0
    kinds = [
        (share, _layer(layout, architecture, moe, width, shared))
        for share, moe in ((moe_share, True), (1 - moe_share, False))
        if share
    ]
    by_kind = {
        "none": lambda x: x.kept + x.outer + x.inner,
        "selective": lambda x: x.kept + x.outer,
        "full": lambda x: x.kept,
    }
    stored = sum(share * by_kind[layout.recompute](x) for share, x in kinds)
    whole = max(by_kind["none"](x) for _, x in kinds)
    again = {"none": 0.0, "selective": max(x.inner for _, x in kinds), "full": whole}
    layers = math.ceil(architecture.layers / stages)
    if chunks == 1:
        in_flight = layers * min(stages - stage, stages)
    else:
        passes = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
        in_flight = math.ceil(passes * layers / chunks)
    edge = architecture.hidden * width / (layout.tensor if layout.sequence_parallel else 1)
    ends = (stage == 0) * edge + (stage == stages - 1) * 2 * edge
    return tokens * (in_flight * stored + again[layout.recompute] + ends)
