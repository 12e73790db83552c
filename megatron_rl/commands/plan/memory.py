"""Bytes of the ranks of a run, and whether they fit.

A trainer rank, by pipeline stage; P parameters of the rank (dense Pd, expert Pe), b bytes of a
parameter (bf16: 2):

    parameters  b P                     gradients  4 P: Megatron's buffer is fp32
    optimizer   (12 in bf16: fp32 copy and two moments; 8 in fp32) x (Pd / replicas + Pe / replicas
                of an expert) with the distributed optimizer, x P without
    logits      fp32, one chunk of tokens of the fused head, and hidden states; on the last stage

Activations follow "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198, section 4); docs/memory.md has the bytes per token and layer. Stage i of p holds p - i
micro-batches (1F1B; interleaved as in section 4.2.3).
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from megatron_rl.config import Parallel, RunConfig
from megatron_rl.models.divisibility import layers_of_stage

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

GIB = 2**30
RESERVE_GIB = 6.0
"""Memory of a trainer's GPU for CUDA, NCCL, temporary tensors and fragmentation."""
EXPERT_IMBALANCE = 1.25
"""Tokens of the busiest expert rank relative to an even spread."""
HEAD_CHUNK_BYTES = 3175 * 2**20
"""Default of `kernels.chunk_mib` on GPU."""
GENERATOR_WORKSPACE_BYTES = 4 * GIB
"""Estimate of vLLM's activations, CUDA graphs and buffers."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a trainer rank of one pipeline stage."""

    stage: int
    count: dict[str, int]
    """Number of parameters: `dense` and `expert`."""
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    transfer: float

    @property
    def total(self) -> float:
        """Everything but the reserve."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.transfer


@dataclass(frozen=True, slots=True)
class GeneratorMemory:
    """Bytes of a generator rank."""

    weights: float
    workspace: float
    kv_cache: float
    """Rest of `generation.gpu_memory_fraction`; may be negative."""
    kv_bytes_per_token: float
    sequence_tokens: int

    @property
    def kv_tokens(self) -> int:
        """Capacity of an engine's KV cache in tokens."""
        return max(0, math.floor(self.kv_cache / self.kv_bytes_per_token))

    @property
    def sequences(self) -> float:
        """Number of completions of full length that decode at once without preemption."""
        return self.kv_tokens / self.sequence_tokens


@dataclass(frozen=True, slots=True)
class LayoutMemory:
    """Memory of a run in its layout."""

    run: RunConfig
    stages: list[StageMemory]
    worst: StageMemory
    """The stage with the fullest ranks."""
    generator: GeneratorMemory
    misfits: list[str]
    """Reasons why it does not fit."""


def estimate(
    run: RunConfig, architecture: Architecture, reserve_gib: float = RESERVE_GIB
) -> LayoutMemory:
    """Return the memory of a run whose layout divides the model, on GPUs of `roles.gpu_gib`."""
    counts = enumerate(count_stages(architecture, run.parallel))
    stages = [_stage_memory(run, architecture, count, stage) for stage, count in counts]
    generator, misfits = generator_memory(run, architecture), []
    worst = max(stages, key=lambda stage: stage.total)
    available = run.roles.gpu_gib - reserve_gib
    if worst.total > available * GIB:
        parts = ("parameters", "gradients", "optimizer", "activations", "logits")
        sizes = sorted(((getattr(worst, part), part) for part in parts), reverse=True)[:3]
        largest = ", ".join(f"{part} {size / GIB:.1f}" for size, part in sizes)
        misfits.append(
            f"trainers: {worst.total / GIB:.1f} GiB on a rank of stage {worst.stage}, but"
            f" {available:.1f} GiB are available ({run.roles.gpu_gib:g} less a reserve of"
            f" {reserve_gib:g}); {largest}"
        )
    if generator.sequences < 1:
        needed = generator.sequence_tokens * generator.kv_bytes_per_token / GIB
        misfits.append(
            f"generators: {generator.weights / GIB:.1f} GiB of weights and"
            f" {generator.workspace / GIB:.1f} of workspace leave a KV cache of"
            f" {max(generator.kv_cache, 0) / GIB:.1f} GiB, but one sequence of"
            f" {generator.sequence_tokens} tokens takes {needed:.1f}: raise"
            " roles.generator_tensor_parallel"
        )
    return LayoutMemory(run, stages, worst, generator, misfits)


def generator_memory(run: RunConfig, architecture: Architecture) -> GeneratorMemory:
    """Return the memory of a generator rank."""
    ranks = run.roles.generator_tensor_parallel
    width, a = 2 if run.generator_dtype == "bf16" else 4, architecture
    total = a.parameters()
    size = float(width * total)
    if run.weights.quantization == "fp8":
        # Linear layers: one byte, and a scale per 128 x 128 block. Embedding and head stay.
        tables = (1 if a.tied else 2) * a.vocabulary * a.hidden
        size = width * tables + (1 + 4 / 128**2) * (total - tables)
    logits = 2 * 4 * run.generation.concurrent_completions * a.vocabulary
    workspace = GENERATOR_WORKSPACE_BYTES + logits
    heads = max(a.groups / ranks, 1)  # replicated if there are more ranks than heads
    budget = run.generation.gpu_memory_fraction * run.roles.gpu_gib * GIB
    return GeneratorMemory(
        weights=size / ranks,
        workspace=workspace,
        kv_cache=budget - size / ranks - workspace,
        kv_bytes_per_token=2 * a.layers * heads * a.head_dim * width,
        sequence_tokens=run.sequence_tokens,
    )


def count_stages(architecture: Architecture, parallel: Parallel) -> list[Counter[str]]:
    """Count `dense` and `expert` parameters of a rank of each stage, padded vocabulary included.

    They come from the name mapping that loads and exports the model. All ranks of a stage have the
    same number. The sizes must divide the model (`models.divisibility`).
    """
    p = parallel
    counts = _count_parts(architecture, p.tensor, p.expert, p.expert_tensor)
    stages = []
    for stage in range(p.pipeline):
        layers = layers_of_stage(architecture.layers, p.pipeline, p.virtual_pipeline, stage)
        parts: list[int | str] = [*layers]
        if stage == 0:
            parts.append("embedding")
        if stage == p.pipeline - 1:
            parts.append("decoder")
            # Tied embeddings are one tensor if the first stage is the last one, too.
            if not architecture.tied or p.pipeline > 1:
                parts.append("output_layer")
        stages.append(sum((counts[part] for part in parts), Counter()))
    return stages


@functools.lru_cache(maxsize=256)
def _count_parts(
    architecture: Architecture, tensor: int, expert: int, expert_tensor: int
) -> dict[int | str, Counter[str]]:
    """Count a rank's parameters by layer, and by module outside the layers (`decoder`: norm)."""
    counts: dict[int | str, Counter[str]] = defaultdict(Counter)
    for weight in architecture.weights():
        part = weight.megatron.partition(".")[0] if weight.layer is None else weight.layer
        shape, split = weight.shape, cast(Any, weight.split)
        if weight.expert is None:
            counts[part]["dense"] += _elements(shape, split, tensor)
        elif weight.expert < architecture.experts // expert:
            counts[part]["expert"] += _elements(shape, split, expert_tensor)
    return counts


@functools.cache
def _elements(shape: tuple[int, ...], split: Any, size: int) -> int:
    """Return the number of elements of one of `size` shards."""
    import torch

    return int(split.shard(torch.empty(shape, device="meta"), 0, size).numel())


def _stage_memory(
    run: RunConfig, architecture: Architecture, count: Counter[str], stage: int
) -> StageMemory:
    p, bf16 = run.parallel, run.precision.params == "bf16"
    width = 2 if bf16 else 4
    replicas = run.roles.trainer_ranks // (p.tensor * p.pipeline)
    expert_replicas = run.roles.trainer_ranks // (p.expert * p.expert_tensor * p.pipeline)
    if not p.distributed_optimizer or replicas == 1:
        replicas = expert_replicas = 1
    owned = count["dense"] / replicas + count["expert"] / expert_replicas
    tokens = math.ceil(max(run.schedule.micro_batch_tokens, run.sequence_tokens) / p.context)
    chunk = run.kernels.chunk_mib
    budget = HEAD_CHUNK_BYTES if chunk is None else chunk * 2**20
    if run.kernels.head == "plain":
        budget = math.inf
    # The chunk, then gathered hidden states and their gradient, in `params` and summed in fp32.
    logits = min(budget, 4.0 * tokens * -(-architecture.vocabulary // p.tensor))
    logits += tokens * architecture.hidden * (2 * width + 4)
    return StageMemory(
        stage,
        {kind: count[kind] for kind in ("dense", "expert")},
        parameters=width * count.total(),
        gradients=4 * count.total(),
        optimizer=(12 if bf16 else 8) * owned,
        activations=tokens * _token_activations(p, architecture, stage, width),
        logits=logits if stage == p.pipeline - 1 else 0.0,
        transfer=2 * run.weights.bucket_bytes,
    )


def _layer_activations(
    p: Parallel, architecture: Architecture, moe: bool, width: int
) -> tuple[float, float, float]:
    """Return the bytes per token of one layer: input, other outer and inner activations."""
    a, fields = architecture, architecture.config_fields()
    t, s = p.tensor, p.tensor if p.sequence_parallel else 1
    kept = a.hidden * width / s
    heads = (2 * a.heads + 2 * a.groups) * a.head_dim * width / t + 4 * a.heads / t
    outer = 3 * kept + heads
    if not moe:
        return kept, outer, 3 * fields["ffn_hidden_size"] * width / t
    wide = fields["moe_ffn_hidden_size"] * width / s
    shared = fields.get("moe_shared_expert_intermediate_size") or 0
    routed = a.experts_per_token * EXPERT_IMBALANCE
    outer += 8 * a.experts / s
    outer += routed * (2 * a.hidden * width * p.expert_tensor / s + 2 * wide)
    return kept, outer, routed * wide + 3 * shared * width / t


def _token_activations(p: Parallel, architecture: Architecture, stage: int, width: int) -> float:
    """Return the largest number of bytes per token that a rank keeps for backward."""
    frequency = architecture.config_fields().get("moe_layer_freq", 1)
    moe_share = 1.0 if architecture.experts else 0.0
    if isinstance(frequency, list) and architecture.experts:
        moe_share = sum(frequency) / len(frequency)
    # The layers of a stage are similar enough for their mean.
    kinds = [
        (share, _layer_activations(p, architecture, moe, width))
        for share, moe in ((moe_share, True), (1 - moe_share, False))
        if share
    ]
    dropped = {"none": 0, "selective": 1, "full": 2}[p.recompute]
    stored = sum(share * sum(parts[: 3 - dropped]) for share, parts in kinds)
    recomputed = {0: 0.0, 1: max(x[2] for _, x in kinds), 2: max(sum(x) for _, x in kinds)}[dropped]
    layers, stages, chunks = (
        math.ceil(architecture.layers / p.pipeline),
        p.pipeline,
        p.virtual_pipeline,
    )
    in_flight = layers * (stages - stage)
    if chunks > 1:
        passes = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
        in_flight = math.ceil(passes * layers / chunks)
    edge = architecture.hidden * width / (p.tensor if p.sequence_parallel else 1)
    ends = (stage == 0) * edge + (stage == stages - 1) * 2 * edge
    return in_flight * stored + recomputed + ends
