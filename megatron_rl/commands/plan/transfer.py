"""Bytes and seconds of one weight update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config import RunConfig

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

LINKS = {
    "shared file system at 2 GB/s (written, then read)": 1.0e9,
    "100 Gb/s Ethernet": 12.5e9,
    "400 Gb/s InfiniBand": 50.0e9,
    "NVLink of a Hopper node (450 GB/s)": 450.0e9,
}
"""Bytes per second of one sender at its best; a real one reaches a part of that."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One weight update, from the trainers to all generators."""

    num_bytes: int
    """Bytes of the model in the generators' number format; every generator rank receives them."""
    seconds: dict[str, float]
    """Time by link: the bytes over its speed. Engines receive at once, senders take turns."""


def estimate_transfer(run: RunConfig, architecture: Architecture) -> Transfer:
    """How long the bytes of an update are under way."""
    width = 2 if run.generator_dtype == "bf16" else 4
    if run.weights.quantization == "fp8":
        width = 1
    size = width * architecture.parameters()
    return Transfer(size, {name: size / speed for name, speed in LINKS.items()})
