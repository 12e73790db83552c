"""Lossless differences of two versions of a bucket, in words of 16 bits.

A difference is the words that changed: of each, the distance to the one before (uint16, less one)
and its new value (uint16), after the number of them (int64). An optimizer step at a small learning
rate changes a few bf16 values in a thousand, so a difference is a hundred times smaller than the
bucket. It works for any dtype and pays only if few words change. A distance beyond 65,536 is
bridged by words that did not change.

Made by torch on the device of the bytes, applied by numpy in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.weights.store import Bytes

if TYPE_CHECKING:
    from torch import Tensor

_FARTHEST, _COUNT_BYTES = 2**16, 8
_PIECE = 2**20  # words that are compared before their number decides whether the rest is


def encode(old: Tensor, new: Tensor, most_bytes: int) -> Tensor | None:
    """Return the difference that makes `new` of `old`; None if it is larger than `most_bytes`.

    All are flat bytes, uint8, on one device; `old` and `new` have the same even size.
    """
    import torch

    words, count = new.view(torch.int16), 0
    parts = []
    for pair in zip(old.view(torch.int16).split(_PIECE), words.split(_PIECE), strict=True):
        parts.append(torch.ne(*pair))
        count += int(torch.count_nonzero(parts[-1]))
        if _COUNT_BYTES + 4 * count > most_bytes:  # fp32: after the first pieces
            return None
    changed = torch.cat(parts) if parts else words.bool()
    positions = _bridged(torch.nonzero(changed).view(-1))
    count = positions.numel()
    if _COUNT_BYTES + 4 * count > most_bytes:
        return None
    # torch has no arithmetic on uint16: the low half of an int64 has the same bits.
    distances = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
    parts = [positions.new_tensor([count]), distances.to(torch.int16), words[positions]]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def _bridged(positions: Tensor) -> Tensor:
    """Return the positions with enough others between them."""
    import torch

    before = torch.cat([positions.new_full((1,), -1), positions[:-1]])
    missing = (positions - before - 1) // _FARTHEST
    if not missing.any():
        return positions
    starts = before.repeat_interleave(missing)
    first = torch.cumsum(missing, 0) - missing
    turns = torch.arange(starts.numel(), device=starts.device) - first.repeat_interleave(missing)
    return torch.cat([positions, starts + _FARTHEST * (turns + 1)]).sort().values


def apply(bucket: Bytes, difference: Bytes) -> None:
    """Change a bucket in place; ValueError: not a difference of its size, it may be spoiled."""
    count = int(difference[:_COUNT_BYTES].view(np.int64)[0]) if difference.size >= 8 else -1
    if count < 0 or difference.size != _COUNT_BYTES + 4 * count:
        raise ValueError(f"{difference.size} bytes are not a difference of {count} words")
    words = difference[_COUNT_BYTES:].view(np.uint16)
    positions = np.cumsum(words[:count].astype(np.int64) + 1) - 1
    if count and positions[-1] >= bucket.size // 2:
        raise ValueError(f"word {positions[-1]} is beyond the bucket's {bucket.size // 2} words")
    bucket.view(np.uint16)[positions] = words[count:]


def encode_on_device(old: Tensor, new: Tensor, most_bytes: int) -> Tensor | None:
    """Return `encode` of pinned host memory, made on the GPU where there is one; on the CPU."""
    import torch

    if not torch.cuda.is_available():
        return encode(old, new, most_bytes)
    with torch.cuda.stream(torch.cuda.Stream()):  # training goes on in its own
        made = encode(old.cuda(non_blocking=True), new.cuda(non_blocking=True), most_bytes)
        return None if made is None else made.cpu()
