"""Buckets: a stream of tensors divided by bytes, and one bucket as flat bytes.

Layout of flat bytes: the tensors' bytes in their order, each beginning at a multiple of
`ALIGNMENT`, zeros between. Both ends compute the offsets from names, dtypes and shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.messages import Manifest, TensorInfo
from megatron_rl.weights.manifest import WeightsError

ALIGNMENT = 16
"""Bytes; the largest element that any dtype has."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without the module: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def tensor_info(name: str, tensor: Tensor) -> TensorInfo:
    """Return a tensor's entry in a manifest."""
    return TensorInfo(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))


def tensor_bytes(info: TensorInfo) -> int:
    """Return the bytes of a tensor."""
    return math.prod(info.shape) * int(getattr(torch, info.dtype).itemsize)


def reject_doubled_names(
    stream: Iterator[tuple[str, Tensor]], version: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the stream as it is.

    Raises:
        WeightsError: a name that comes a second time.
    """
    seen: set[str] = set()
    for name, tensor in stream:
        if name in seen:
            raise WeightsError(
                f"weights version {version}: the stream yielded {name} twice; the exporter must"
                " write each name once"
            )
        seen.add(name)
        yield name, tensor


def into_buckets(
    stream: Iterator[tuple[str, Tensor]], bucket_bytes: int, version: int
) -> Iterator[dict[str, Tensor]]:
    """Yield CPU copies of the tensors, bucket by bucket.

    Args:
        stream: full tensors by name; a buffer may be reused for the next one.
        bucket_bytes: tensors are gathered up to this size; a larger one is its own bucket.
        version: for the message.

    Raises:
        WeightsError: a doubled name.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in reject_doubled_names(stream, version):
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        bucket[name] = copied.copy_(tensor.detach())
        size += tensor.nbytes
    if bucket:
        yield bucket


def manifest_of(
    version: int,
    checksums: Mapping[str, str],
    entries: Sequence[Sequence[TensorInfo]],
    path: str = "",
    **fields: Any,
) -> Manifest:
    """Return a manifest, from the checksum of each bucket by name and the entries in each."""
    tensors = tuple(info for infos in entries for info in infos)
    return Manifest(
        version=version,
        path=path,
        buckets=tuple(checksums),
        checksums=tuple(checksums.values()),
        tensors=tensors,
        num_bytes=sum(map(tensor_bytes, tensors)),
        bucket_tensors=tuple(map(len, entries)),
        **fields,
    )


def offsets(infos: Sequence[TensorInfo]) -> tuple[list[int], int]:
    """Return (first byte of each tensor in the flat bucket, the bucket's size)."""
    starts, end = [], 0
    for info in infos:
        starts.append(end)
        end += -(-tensor_bytes(info) // ALIGNMENT) * ALIGNMENT
    return starts, end


def flatten(tensors: dict[str, Tensor]) -> tuple[list[TensorInfo], Tensor]:
    """Return (entries of the tensors, the bucket as flat bytes [size] uint8); all on CPU."""
    infos = [tensor_info(name, tensor) for name, tensor in tensors.items()]
    starts, size = offsets(infos)
    flat = torch.zeros(size, dtype=torch.uint8)
    for tensor, start in zip(tensors.values(), starts, strict=True):
        flat[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
    return infos, flat


def unflatten(infos: Sequence[TensorInfo], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a flat bucket, as views of it."""
    starts, _ = offsets(infos)
    for info, start in zip(infos, starts, strict=True):
        part = flat[start : start + tensor_bytes(info)]
        yield info.name, part.view(getattr(torch, info.dtype)).view(info.shape)
