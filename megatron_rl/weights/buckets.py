"""Layout of a bucket: the bytes of its tensors, one after the other.

Each tensor begins at a multiple of `ALIGNMENT`, with zeros between. All sides compute the offsets
from names, dtypes and shapes alone.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_rl.messages import TensorInfo

ALIGNMENT = 16
"""Bytes; the largest element that any dtype has."""


def tensor_info(name: str, tensor: Tensor) -> TensorInfo:
    """Return a tensor's entry in a manifest."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorInfo(name=name, dtype=dtype, shape=tuple(tensor.shape))


def tensor_bytes(info: TensorInfo) -> int:
    """Return the bytes of a tensor."""
    return math.prod(info.shape) * int(getattr(torch, info.dtype).itemsize)


def offsets(infos: Sequence[TensorInfo]) -> tuple[list[int], int]:
    """Return (first byte of each tensor in the bucket, the bucket's size)."""
    starts, end = [], 0
    for info in infos:
        starts.append(end)
        end += -(-tensor_bytes(info) // ALIGNMENT) * ALIGNMENT
    return starts, end


def views(infos: Sequence[TensorInfo], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket, as views of its bytes (uint8 [size])."""
    starts, _ = offsets(infos)
    for info, start in zip(infos, starts, strict=True):
        part = flat[start : start + tensor_bytes(info)]
        yield info.name, part.view(getattr(torch, info.dtype)).view(info.shape)
