"""Bytes of a generator rank, and what its KV cache holds: all layers keep all positions.

(vLLM keeps less for layers of chunked attention; the numbers here are then on the safe side.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config import RunConfig

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

GIB = 2**30
GENERATOR_WORKSPACE_BYTES = 4 * GIB
"""vLLM's activations, CUDA graphs and buffers beside weights and KV cache, an estimate."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The device, and what no formula says."""

    gpu_gib: float = 80.0
    """Memory of a GPU."""
    reserve_gib: float = 6.0
    """Of a trainer's GPU: CUDA context, NCCL buffers, temporary tensors, fragmentation."""


@dataclass(frozen=True, slots=True)
class GeneratorMemory:
    """Bytes of a generator rank, and what its KV cache holds."""

    weights: float
    workspace: float
    kv_cache: float
    """What `generation.gpu_memory_fraction` leaves; negative: nothing."""
    kv_bytes_per_token: float
    sequence_tokens: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that an engine's KV cache holds."""
        return max(0, math.floor(self.kv_cache / self.kv_bytes_per_token))

    @property
    def sequences(self) -> float:
        """Completions of full length that decode at once without being preempted."""
        return self.kv_tokens / self.sequence_tokens


def generator_memory(
    run: RunConfig, ranks: int, architecture: Architecture, assumed: Assumptions
) -> GeneratorMemory:
    """Memory of a rank of an engine of `ranks` ranks."""
    width, a = 2 if run.generator_dtype == "bf16" else 4, architecture
    weights = _generator_weights(run, a, width) / ranks
    logits = 2 * 4 * run.generation.concurrent_completions * a.vocabulary
    workspace = GENERATOR_WORKSPACE_BYTES + logits
    heads = max(a.groups / ranks, 1)  # repeated where there are more ranks than heads
    budget = run.generation.gpu_memory_fraction * assumed.gpu_gib * GIB
    return GeneratorMemory(
        weights,
        workspace,
        kv_cache=budget - weights - workspace,
        kv_bytes_per_token=2 * a.layers * heads * a.head_dim * width,
        sequence_tokens=run.sequence_tokens,
    )


def _generator_weights(run: RunConfig, architecture: Architecture, width: int) -> float:
    """Bytes of the model as generators hold it."""
    total = architecture.parameters()
    if run.weights.quantization != "fp8":
        return width * total
    # Linear layers are one byte with a scale per 128 x 128 block; tables and norms stay.
    tables = (1 if architecture.tied else 2) * architecture.vocabulary * architecture.hidden
    return width * tables + (1 + 4 / 128**2) * (total - tables)


def generator_misfits(generator: GeneratorMemory) -> list[str]:
    """Why generator ranks don't fit."""
    if generator.sequences >= 1:
        return []
    needed = generator.sequence_tokens * generator.kv_bytes_per_token / GIB
    return [
        f"generators: {generator.weights / GIB:.1f} GiB of weights and"
        f" {generator.workspace / GIB:.1f} of workspace leave a KV cache of"
        f" {max(generator.kv_cache, 0) / GIB:.1f} GiB, and one sequence of"
        f" {generator.sequence_tokens} tokens takes {needed:.1f}: raise"
        " roles.generator_tensor_parallel"
    ]
