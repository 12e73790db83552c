"""Page-lock mapped memory for copies to and from a GPU; does nothing without CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.store import Bytes


def pin(regions: Sequence[Bytes]) -> None:
    """Register memory with CUDA.

    Raises:
        WeightsError: CUDA refuses (its own message is in the error).
    """
    if not torch.cuda.is_available():
        return
    for region in regions:
        if region.size:
            result = torch.cuda.cudart().cudaHostRegister(region.ctypes.data, region.size, 0)
            if int(result) != 0:
                raise WeightsError(
                    f"cudaHostRegister of {region.size} bytes of weights failed: {result}; raise"
                    " the limit of locked memory (ulimit -l) and the container's shared memory"
                )


def unpin(regions: Sequence[Bytes]) -> None:
    """Undo `pin`."""
    if torch.cuda.is_available():
        for region in regions:
            if region.size:
                torch.cuda.cudart().cudaHostUnregister(region.ctypes.data)
