"""Buckets as tensors: their layout, and their memory, which a GPU reads and writes itself.

Each tensor of a bucket begins at a multiple of `ALIGNMENT`, with zeros between. All sides compute
the offsets from names, dtypes and shapes alone.
"""

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_rl.messages import TensorInfo
from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.store import Bytes

ALIGNMENT = 16  # bytes: the largest element that any dtype has


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


def pin(regions: Sequence[Bytes]) -> None:
    """Register memory with CUDA, if there is any, until `unpin`; WeightsError: CUDA refuses."""
    for region in regions if torch.cuda.is_available() else ():
        if region.size:
            result = torch.cuda.cudart().cudaHostRegister(region.ctypes.data, region.size, 0)
            if int(result) != 0:
                raise WeightsError(
                    f"cudaHostRegister of {region.size} bytes of weights failed: {result}; raise"
                    " the limit of locked memory (ulimit -l) and the container's shared memory"
                )


def unpin(regions: Sequence[Bytes]) -> None:
    """Take back `pin`, before the memory is unmapped; raises WeightsError as it does."""
    for region in regions if torch.cuda.is_available() else ():
        if region.size:
            result = torch.cuda.cudart().cudaHostUnregister(region.ctypes.data)
            if int(result) != 0:
                raise WeightsError(f"cudaHostUnregister of weights failed: {result}")


def as_tensor(data: Bytes) -> Tensor:
    """Return memory as a tensor, after `pin` one on the GPU.

    A copy of a slice, strided ones too, then moves the bytes of the slice alone, by the GPU.
    """
    if not torch.cuda.is_available():
        return torch.from_numpy(data)
    place = {"data": (data.ctypes.data, False), "shape": data.shape, "typestr": "|u1", "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=place), device="cuda")
