"""Bytes of the ranks of a run, and whether they fit: the formulas of docs/memory.md.

Activations follow "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198, section 4). Stage i of p holds p - i micro-batches (1F1B; interleaved: section 4.2.3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from megatron_rl.commands.plan import nodes, tensors
from megatron_rl.commands.plan.nodes import GIB
from megatron_rl.config import Parallel, RunConfig

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

RESERVE_GIB = 6.0  # memory of a trainer's GPU for CUDA, NCCL, temporary tensors and fragmentation
EXPERT_IMBALANCE = 1.25  # tokens of the busiest expert rank relative to an even spread
HEAD_CHUNK_MIB = 3175.0  # default of `kernels.chunk_mib` on GPU
GENERATOR_WORKSPACE_BYTES = 4 * GIB  # estimate of vLLM's activations, CUDA graphs and buffers
EXPORT_COPIES = 3  # copies of a bucket while it is joined: as received, shards, joined tensors
DIFFERENCE_COPIES = 3  # in buckets, on GPU: both versions, a byte per 16-bit word, the changes
RELOAD_COPIES = 2  # of a module while vLLM loads it: as loaded, and in the layout of its kernels
ENGINE_START_SECONDS = 300.0  # estimate of an engine's compilation and CUDA graphs


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a trainer rank of one pipeline stage."""

    stage: int
    count: dict[str, int]  # number of parameters: `dense` and `expert`
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    export: float  # while a version is joined, between two steps
    difference: float  # two versions of a bucket and their difference, during training

    @property
    def total(self) -> float:
        """Everything but the reserve; a version is joined when there are no activations."""
        states = self.parameters + self.gradients + self.optimizer
        step = max(self.activations + self.logits, self.export)
        return states + step + self.difference


@dataclass(frozen=True, slots=True)
class GeneratorMemory:
    """Bytes of a generator rank."""

    weights: float
    workspace: float
    kv_cache: float  # rest of `generation.gpu_memory_fraction`; may be negative
    kv_bytes_per_sequence: float  # of full length; chunked attention keeps its last chunk alone
    update: float  # while weights are loaded, outside `generation.gpu_memory_fraction`

    @property
    def sequences(self) -> float:
        """Number of completions of full length that decode at once without preemption."""
        return max(0.0, self.kv_cache / self.kv_bytes_per_sequence)


@dataclass(frozen=True, slots=True)
class LayoutMemory:
    """Memory of a run in its layout."""

    run: RunConfig
    stages: list[StageMemory]
    worst: StageMemory  # the stage with the fullest ranks
    generator: GeneratorMemory
    hosts: list[nodes.HostMemory]  # of all nodes, neighbors that need the same as one
    misfits: list[str] = field(default_factory=list)  # reasons why it does not fit
    notes: list[str] = field(default_factory=list)  # why it is slow, or may end at a time-out


def estimate(
    run: RunConfig, architecture: Architecture, reserve_gib: float = RESERVE_GIB
) -> LayoutMemory:
    """Return the memory of a run whose layout divides the model, on GPUs of `roles.gpu_gib`."""
    counts = enumerate(tensors.count_stages(architecture, run.parallel))
    stages = [_stage_memory(run, architecture, count, stage) for stage, count in counts]
    worst = max(stages, key=lambda stage: stage.total)
    generator, hosts = generator_memory(run, architecture), nodes.host_memory(run, architecture)
    memory = LayoutMemory(run, stages, worst, generator, hosts)
    memory.misfits.extend(_misfits(memory, reserve_gib))
    memory.notes.extend(_notes(memory, architecture))
    return memory


def _misfits(memory: LayoutMemory, reserve_gib: float) -> Iterator[str]:
    run, worst, generator = memory.run, memory.worst, memory.generator
    total, taken, remedy = run.roles.gpu_gib, reserve_gib, ""
    text = f"{total:g} less a reserve of {reserve_gib:g}"
    if run.roles.one_gpu:
        share = run.generation.gpu_memory_fraction * total + generator.update / GIB
        taken, text = taken + share, f"{text} and {share:.1f} of the generator"
        remedy = "; lower generation.gpu_memory_fraction"
    if worst.total > (total - taken) * GIB:
        names = ("parameters", "gradients", "optimizer", "activations", "logits", "difference")
        sizes = sorted(((getattr(worst, name), name) for name in names), reverse=True)[:3]
        largest = ", ".join(f"{name} {size / GIB:.1f}" for size, name in sizes)
        yield (
            f"trainers: {worst.total / GIB:.1f} GiB on a rank of stage {worst.stage}, but"
            f" {total - taken:.1f} GiB are available ({text}); {largest}{remedy}"
        )
    if generator.sequences < 1:
        yield (
            f"generators: {generator.weights / GIB:.1f} GiB of weights and"
            f" {generator.workspace / GIB:.1f} of workspace leave a KV cache of"
            f" {max(generator.kv_cache, 0) / GIB:.1f} GiB, but one sequence of"
            f" {run.sequence_tokens} tokens takes {generator.kv_bytes_per_sequence / GIB:.1f}:"
            " raise roles.generator_tensor_parallel"
        )
    fraction = run.generation.gpu_memory_fraction
    rest = (1 - fraction) * total
    if generator.update > rest * GIB:
        yield (
            f"generators: an update of the weights takes {generator.update / GIB:.1f} GiB, but"
            f" generation.gpu_memory_fraction = {fraction:g} leaves {rest:.1f}: lower it, or raise"
            " roles.generator_tensor_parallel"
        )
    host = max(memory.hosts, key=lambda host: host.total)
    if host.total > run.roles.host_gib * GIB:
        yield (
            f"host of {host.name}: {host.total / GIB:.1f} GiB, but roles.host_gib is"
            f" {run.roles.host_gib:g}; versions of the weights {host.versions / GIB:.1f}, saving"
            f" {host.saving / GIB:.1f}, processes {host.processes / GIB:.1f}: set weights.directory"
            " to a folder that all nodes share, or weights.quantization to 'fp8'; more nodes of"
            " trainers share the copy of a checkpoint (saving)"
        )


def _notes(memory: LayoutMemory, architecture: Architecture) -> Iterator[str]:
    run, generator = memory.run, memory.generator
    update = nodes.update_time(run, architecture)
    wanted = run.generation.concurrent_completions
    if 1 <= generator.sequences < wanted:
        yield (
            f"the KV cache of an engine holds {generator.sequences / wanted:.0%} of"
            f" generation.concurrent_completions = {wanted} at full length; beyond that, decoding"
            f" preempts and computes again: lower it to {math.floor(generator.sequences)}, or raise"
            " roles.generator_tensor_parallel"
        )
    limits = run.timeouts
    if update.travel_whole > limits.transfer_seconds:
        yield (
            f"a whole version of the weights takes {update.travel_whole:.0f} s to the last node,"
            f" and timeouts.transfer_seconds is {limits.transfer_seconds:g}: raise it"
        )
    count, rate = len(nodes.nodes_of(run).ranks), nodes.SHARED_FILES
    read = count * update.num_bytes
    if (seconds := ENGINE_START_SECONDS + read / rate) > limits.startup_seconds:
        yield (
            f"{count} nodes read {read / 1e12:.1f} TB of the start checkpoint at"
            f" {rate / 1e9:g} GB/s before the engines start, about {seconds:.0f} s, and"
            f" timeouts.startup_seconds is {limits.startup_seconds:g}: raise it"
        )
    host, usual = max(memory.hosts, key=lambda host: host.shared), run.roles.host_gib / 2
    if host.shared > usual * GIB:
        yield (
            f"{host.name}: versions of the weights take {host.shared / GIB:.0f} GiB of /dev/shm, to"
            f" which Linux gives half of the memory, {usual:g}: mount it larger (mount -o"
            " remount,size=), or set weights.directory"
        )


def generator_memory(run: RunConfig, architecture: Architecture) -> GeneratorMemory:
    """Return the memory of a generator rank."""
    ranks, tokens = run.roles.generator_tensor_parallel, run.sequence_tokens
    width, a = 2 if run.generator_dtype == "bf16" else 4, architecture
    weights = tensors.update_bytes(run, a) / ranks
    logits = 2 * 4 * run.generation.concurrent_completions * a.vocabulary
    workspace = GENERATOR_WORKSPACE_BYTES + logits
    heads = max(a.groups / ranks, 1)  # replicated if there are more ranks than heads
    kept = (min(tokens, a.layer_options(i).get("chunk") or tokens) for i in range(a.layers))
    return GeneratorMemory(
        weights=weights,
        workspace=workspace,
        kv_cache=run.generation.gpu_memory_fraction * run.roles.gpu_gib * GIB - weights - workspace,
        kv_bytes_per_sequence=2 * heads * a.head_dim * width * sum(kept),
        update=RELOAD_COPIES * tensors.largest_module(run, a) / ranks,
    )


def _stage_memory(
    run: RunConfig, architecture: Architecture, count: Counter[str], stage: int
) -> StageMemory:
    p, bf16 = run.parallel, run.precision.params == "bf16"
    width, owned = 2 if bf16 else 4, float(count.total())
    ranks, tensor, expert = run.roles.trainer_ranks // p.pipeline, p.tensor, p.expert
    if p.distributed_optimizer and ranks > tensor:
        replicas, expert_replicas = ranks // tensor, ranks // (expert * p.expert_tensor)
        owned = count["dense"] / replicas + count["expert"] / expert_replicas
    tokens = math.ceil(max(run.schedule.micro_batch_tokens, run.sequence_tokens) / p.context)
    budget = (run.kernels.chunk_mib or HEAD_CHUNK_MIB) * 2**20
    if run.kernels.head == "plain":
        budget = math.inf
    units = tensors.sent_units(run, architecture, stage)
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
        export=EXPORT_COPIES * tensors.bucket_bytes(run, [unit.joined for unit in units]),
        difference=DIFFERENCE_COPIES * tensors.bucket_bytes(run, [unit.sent for unit in units]),
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
    moe_share = fmean(architecture.config_fields().get("moe_layer_freq", [0]))
    # The layers of a stage are similar enough for their mean.
    kinds = [
        (share, _layer_activations(p, architecture, moe, width))
        for share, moe in ((moe_share, True), (1 - moe_share, False))
        if share
    ]
    dropped = {"none": 0, "selective": 1, "full": 2}[p.recompute]
    stored = sum(share * sum(parts[: 3 - dropped]) for share, parts in kinds)
    recomputed = {0: 0.0, 1: max(x[2] for _, x in kinds), 2: max(sum(x) for _, x in kinds)}[dropped]
    layers, stages = math.ceil(architecture.layers / p.pipeline), p.pipeline
    in_flight = layers * (stages - stage)
    if (chunks := p.virtual_pipeline) > 1:
        passes = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
        in_flight = math.ceil(passes * layers / chunks)
    edge = architecture.hidden * width / (p.tensor if p.sequence_parallel else 1)
    ends = (stage == 0) * edge + (stage == stages - 1) * 2 * edge
    return in_flight * stored + recomputed + ends
