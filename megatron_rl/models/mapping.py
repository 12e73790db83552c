"""The mapping of parameters: Hugging Face tensors <-> Megatron's shards on tensor-parallel ranks.

One `Weight` per parameter serves both directions:

    load:    hf tensors --pack.to_megatron--> full --split.shard--> the shard of one rank
    export:  shards of all ranks --split.unshard--> full --pack.to_huggingface--> hf tensors

Both only move elements, so HF -> Megatron -> HF is bit-exact.

Shape legend: H hidden, F feed-forward, V vocabulary, N query heads, G key-value groups, D head.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, override

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pack:
    """Hugging Face tensors <-> the full Megatron tensor; by default one tensor, unchanged."""

    to_megatron: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: tensors[0]
    to_huggingface: Callable[[Tensor], Sequence[Tensor]] = lambda full: [full]


UNCHANGED = Pack()
TRANSPOSED = Pack(lambda tensors: tensors[0].t(), lambda full: [full.t()])
"""One matrix, stored as input x output in Hugging Face."""
GATE_UP = Pack(lambda tensors: torch.cat(list(tensors)), lambda full: full.chunk(2))
"""gate [F, H] and up [F, H] in one matrix [2F, H]."""


def query_key_value(groups: int, head_dim: int) -> Pack:
    """Return q [N*D, H], k [G*D, H], v [G*D, H] <-> [G, (N/G + 2) * D, H], flattened."""

    def join(tensors: Sequence[Tensor]) -> Tensor:
        parts = [t.reshape(groups, -1, t.shape[-1]) for t in tensors]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def divide(full: Tensor) -> list[Tensor]:
        grouped = full.view(groups, -1, full.shape[-1])
        queries = grouped.shape[1] - 2 * head_dim
        parts = grouped.split([queries, head_dim, head_dim], dim=1)
        return [p.reshape(-1, full.shape[-1]) for p in parts]

    return Pack(join, divide)


@dataclass(frozen=True, slots=True)
class Split:
    """The full Megatron tensor <-> shards of `size` tensor-parallel ranks; here full on each."""

    sharded: ClassVar[bool] = False

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Return the shard of a rank."""
        return full

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from the shards of all ranks."""
        return shards[0]


@dataclass(frozen=True, slots=True)
class Along(Split):
    """Contiguous parts of one dimension; `parts` > 1 splits each of that many blocks (gate and up).

    Example: `Along(0, parts=2)` gives rank r of a [2F, H] the rows [gate_r; up_r].
    """

    dim: int
    parts: int = 1
    sharded: ClassVar[bool] = True

    @override
    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        blocks = full.unflatten(self.dim, (self.parts, size, -1)).select(self.dim + 1, rank)
        return blocks.clone(memory_format=torch.contiguous_format).flatten(self.dim, self.dim + 1)

    @override
    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        parts = [shard.chunk(self.parts, self.dim) for shard in shards]
        blocks = [torch.cat([p[i] for p in parts], self.dim) for i in range(self.parts)]
        return torch.cat(blocks, self.dim)


@dataclass(frozen=True, slots=True)
class VocabularyRows(Split):
    """Rows of the vocabulary, padded with zeros."""

    vocabulary: int
    padded: int | None = None
    """Rows with the padding; None: the next multiple of the tensor-parallel size."""
    sharded: ClassVar[bool] = True

    @override
    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        missing = (self.padded or padded_vocabulary(self.vocabulary, size)) - self.vocabulary
        return torch.nn.functional.pad(full, (0, 0, 0, missing)).chunk(size)[rank]

    @override
    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards))[: self.vocabulary]


def padded_vocabulary(vocabulary: int, tensor_parallel: int) -> int:
    """Round the vocabulary up to a multiple of the tensor-parallel size."""
    return -(-vocabulary // tensor_parallel) * tensor_parallel


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of Megatron and its Hugging Face tensors.

    Example: expert 3 of layer 0 of Llama 4 (H = 5120, F = 8192), whose checkpoint has one tensor
    for all experts: `Weight("decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight",
    ("model.layers.0.feed_forward.experts.down_proj",), (5120, 8192), TRANSPOSED, Along(1),
    expert=3, index=3)`.
    """

    megatron: str
    """Name in the local (not Transformer Engine) spec, with global layer and expert numbers."""
    hf: tuple[str, ...]
    shape: tuple[int, ...]  # of the full Megatron tensor, without padding of the vocabulary
    pack: Pack = UNCHANGED
    split: Split = Split()
    expert: int | None = None  # global number of its expert; None for dense parameters
    index: int | None = None
    """Position in the first dimension of an HF tensor that holds all experts."""
    exported: bool = True  # False for the second copy of tied embeddings, which is only loaded

    @property
    def elements(self) -> int:
        """Elements of the full tensor, without padding of the vocabulary."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Global number of its layer; None outside the layers."""
        match = _LAYER.match(self.megatron)
        return None if match is None else int(match[1])

    def hf_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of its part of each Hugging Face tensor (of one expert, if joint)."""
        full = torch.empty(self.shape, device="meta")
        return [tuple(part.shape) for part in self.pack.to_huggingface(full)]

    def shard_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape on one of `size` tensor-parallel (or expert-tensor-parallel) ranks."""
        return _shard_shape(self.split, self.shape, size)

    def parameter(self, use_te: bool, first_layer: int = 0, first_expert: int = 0) -> str:
        """Return its name among the parameters of a module, by the module's spec.

        `first_layer` is the global number of the module's first layer, `first_expert` that of the
        first expert on this rank.
        """
        name = self.megatron
        if self.expert is not None:
            local = self.expert - first_expert
            name = name.replace(f".local_experts.{self.expert}.", f".local_experts.{local}.")
        if self.layer is not None:
            name = _LAYER.sub(f"decoder.layers.{self.layer - first_layer}.", name)
        return transformer_engine_name(name) if use_te else local_name(name)


@functools.cache
def _shard_shape(split: Split, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(split.shard(torch.empty(shape, device="meta"), 0, size).shape)


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def transformer_engine_name(name: str) -> str:
    """Translate a parameter name of the local spec to the Transformer Engine spec.

    There, norms are fused into the next linear layer, except before a mixture of experts, and
    experts are grouped.
    """
    if ".local_experts." in name:
        head, _, tail = name.partition(".local_experts.")
        expert, _, linear = tail.partition(".")
        return f"{head}.{linear}{expert}"
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_dense_layernorm.", ".mlp.linear_fc1.layer_norm_")


def local_name(name: str) -> str:
    """Return the name in the local spec, which has the same norm before both kinds of MLP."""
    return name.replace(".pre_dense_layernorm.", ".pre_mlp_layernorm.")
