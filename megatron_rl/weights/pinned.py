"""Memory that a GPU reads and writes itself: registered with CUDA, where there is one."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.store import Bytes


def pin(regions: Sequence[Bytes]) -> None:
    """Register memory with CUDA, until `unpin`.

    Raises:
        WeightsError: CUDA refuses (its own message is in the error).
    """
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


def as_tensor(data: Bytes) -> torch.Tensor:
    """Return memory as a tensor, after `pin` one on the GPU.

    A copy of a slice, strided ones too, then moves the bytes of the slice alone, by the GPU.
    """
    if not torch.cuda.is_available():
        return torch.from_numpy(data)
    place = {"data": (data.ctypes.data, False), "shape": data.shape, "typestr": "|u1", "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=place), device="cuda")
