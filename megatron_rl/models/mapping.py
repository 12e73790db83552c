"""How a parameter of Megatron is made of Hugging Face tensors, and cut over tensor-parallel ranks.

One `Weight` per parameter serves both directions:

    load:    hf tensors --pack.join--> full --split.cut--> the shard of one rank
    export:  shards of all ranks --split.paste--> full --pack.part--> hf tensors

Both are pure moves of elements, so HF -> Megatron -> HF is bit-exact.

Shape legend: H hidden, F feed-forward, V vocabulary, N query heads, G key-value groups, D head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Pack(Protocol):
    """Hugging Face tensors <-> the whole Megatron tensor."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor: ...

    def part(self, full: Tensor) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Same:
    """One tensor, as it is."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def part(self, full: Tensor) -> list[Tensor]:
        return [full]


@dataclass(frozen=True, slots=True)
class Transposed:
    """One matrix that Hugging Face stores as input x output."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].t()

    def part(self, full: Tensor) -> list[Tensor]:
        return [full.t()]


@dataclass(frozen=True, slots=True)
class GateUp:
    """gate [F, H] and up [F, H] on top of each other: [2F, H]."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors))

    def part(self, full: Tensor) -> list[Tensor]:
        return list(full.chunk(2))


@dataclass(frozen=True, slots=True)
class QueryKeyValue:
    """q [N*D, H], k [G*D, H], v [G*D, H] interleaved by group: [G, (N/G + 2) * D, H] flattened."""

    groups: int
    head_dim: int

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        parts = [t.reshape(self.groups, -1, t.shape[-1]) for t in tensors]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def part(self, full: Tensor) -> list[Tensor]:
        grouped = full.view(self.groups, -1, full.shape[-1])
        queries = grouped.shape[1] - 2 * self.head_dim
        parts = grouped.split([queries, self.head_dim, self.head_dim], dim=1)
        return [p.reshape(-1, full.shape[-1]) for p in parts]


class Split(Protocol):
    """The whole Megatron tensor <-> the shards of `size` tensor-parallel ranks."""

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different shards."""

    def cut(self, full: Tensor, rank: int, size: int) -> Tensor: ...

    def paste(self, shards: Sequence[Tensor]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank holds all of it."""

    sharded: bool = False

    def cut(self, full: Tensor, rank: int, size: int) -> Tensor:
        return full

    def paste(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0]


@dataclass(frozen=True, slots=True)
class Along:
    """Contiguous parts of one dimension; `parts` > 1 cuts each of that many blocks (gate and up).

    Example: `Along(0, parts=2)` gives rank r of a [2F, H] the rows [gate_r; up_r].
    """

    dim: int
    parts: int = 1
    sharded: bool = True

    def cut(self, full: Tensor, rank: int, size: int) -> Tensor:
        blocks = full.chunk(self.parts, self.dim)
        return torch.cat([b.chunk(size, self.dim)[rank] for b in blocks], self.dim)

    def paste(self, shards: Sequence[Tensor]) -> Tensor:
        pieces = [shard.chunk(self.parts, self.dim) for shard in shards]
        blocks = [torch.cat([p[i] for p in pieces], self.dim) for i in range(self.parts)]
        return torch.cat(blocks, self.dim)


@dataclass(frozen=True, slots=True)
class VocabularyRows:
    """Rows of the vocabulary, padded with zeros to a multiple of the tensor-parallel size."""

    vocabulary: int
    sharded: bool = True

    def cut(self, full: Tensor, rank: int, size: int) -> Tensor:
        missing = padded_vocabulary(self.vocabulary, size) - self.vocabulary
        padded = torch.nn.functional.pad(full, (0, 0, 0, missing))
        return padded.chunk(size)[rank]

    def paste(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards))[: self.vocabulary]


def padded_vocabulary(vocabulary: int, tensor_parallel: int) -> int:
    """The vocabulary rounded up to a multiple of the tensor-parallel size."""
    return -(-vocabulary // tensor_parallel) * tensor_parallel


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of Megatron and the Hugging Face tensors that it is made of.

    Example: expert 3 of layer 0 of Llama 4 (H = 5120, F = 8192), whose checkpoint has one tensor
    for all experts: `Weight("decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight",
    ("model.layers.0.feed_forward.experts.down_proj",), (5120, 8192), Transposed(), Along(1),
    expert=3, index=3)`.
    """

    megatron: str
    """Name in the local (not Transformer Engine) spec, with global layer and expert numbers."""
    hf: tuple[str, ...]
    shape: tuple[int, ...]
    """Of the whole Megatron tensor, the vocabulary not padded."""
    pack: Pack = Same()
    split: Split = Whole()
    expert: int | None = None
    """Global number of the expert that it belongs to; None for dense parameters."""
    index: int | None = None
    """Position in the first dimension of an HF tensor that holds all experts."""
    exported: bool = True
    """False for a second copy of tied embeddings, which is only loaded."""

    @property
    def elements(self) -> int:
        """Elements of the whole tensor, the vocabulary not padded."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Global number of its layer; None outside the layers."""
        found = _LAYER.match(self.megatron)
        return None if found is None else int(found[1])

    def hf_shapes(self) -> list[tuple[int, ...]]:
        """Shape of its part of each Hugging Face tensor; one expert's, where one holds all."""
        full = torch.empty(self.shape, device="meta")
        return [tuple(part.shape) for part in self.pack.part(full)]

    def shard_shape(self, size: int) -> tuple[int, ...]:
        """Shape on one of `size` tensor-parallel (or expert-tensor-parallel) ranks."""
        return tuple(self.split.cut(torch.empty(self.shape, device="meta"), 0, size).shape)

    def parameter(self, use_te: bool, first_layer: int = 0, first_expert: int = 0) -> str:
        """Its name among the parameters of a module.

        Args:
            use_te: the module is of the Transformer Engine spec, else of the local one.
            first_layer: global number of the module's first layer.
            first_expert: global number of the first expert on this rank.
        """
        name = self.megatron
        if self.expert is not None:
            local = self.expert - first_expert
            name = name.replace(f".local_experts.{self.expert}.", f".local_experts.{local}.")
        if self.layer is not None:
            name = _LAYER.sub(f"decoder.layers.{self.layer - first_layer}.", name)
        return transformer_engine_name(name) if use_te else local_name(name)


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def transformer_engine_name(name: str) -> str:
    """The name that a parameter of the local spec has in the Transformer Engine spec.

    Norms are fused into the linear layer after them, and experts are grouped. The norm before a
    mixture of experts stays by itself.
    """
    if ".local_experts." in name:
        head, _, tail = name.partition(".local_experts.")
        expert, _, linear = tail.partition(".")
        return f"{head}.{linear}{expert}"
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_dense_layernorm.", ".mlp.linear_fc1.layer_norm_")


def local_name(name: str) -> str:
    """The name in the local spec: there one norm comes before both kinds of MLP."""
    return name.replace(".pre_dense_layernorm.", ".pre_mlp_layernorm.")
