"""What every weight transport offers to the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from megatron_rl.messages import Manifest

WeightStream = Iterator[tuple[str, torch.Tensor]]
"""Full tensors by Hugging Face name, in an order that is the same for every version."""


class Publisher(Protocol):
    """The trainer's end: makes versions that generators can take."""

    def publish(self, version: int, stream: WeightStream, bucket_bytes: int) -> Manifest:
        """Send or store a version; returns when it is complete."""
        ...

    def release(self, version: int) -> None:
        """No generator needs `version` or an older one any more."""
        ...

    def close(self) -> None:
        """Remove everything that was published."""
        ...
