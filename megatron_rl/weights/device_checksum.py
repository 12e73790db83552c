"""A checksum of tensors, computed on their own device at the speed of its memory.

`sum_i w_i k_i` over the 64-bit words of a tensor, modulo 2^64, with odd multipliers `k_i` that look
random: a change of one word always changes it, any other change except with a probability of about
2^-63. It detects torn and misplaced bytes, not an adversary.

Shape legend: W words, B blocks of `BLOCK_WORDS` words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from megatron_rl.messages import TensorInfo

BLOCK_WORDS = 2**20


# As signed numbers.
_FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


def _odd_multipliers(numbers: Tensor) -> Tensor:
    """Scramble int64 numbers; products wrap around."""
    mixed = (numbers + 1) * _FIRST
    mixed = (mixed ^ (mixed >> 29)) * _SECOND
    return (mixed ^ (mixed >> 32)) | 1


@cache
def _block_multipliers_W(device: torch.device) -> Tensor:
    return _odd_multipliers(torch.arange(BLOCK_WORDS, device=device))


def word_sum(tensor: Tensor) -> Tensor:
    """Return the sum over the bytes of one tensor, of any shape and dtype: int64, on its device."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words_W = flat[:whole].view(torch.int64) if whole else flat.new_zeros(0, dtype=torch.int64)
    if whole < flat.numel():
        rest = flat.new_zeros(8)
        rest[: flat.numel() - whole] = flat[whole:]
        words_W = torch.cat([words_W, rest.view(torch.int64)])
    multipliers_W = _block_multipliers_W(flat.device)
    sums_B = [(b * multipliers_W[: b.numel()]).sum() for b in words_W.split(BLOCK_WORDS)]
    blocks_B = torch.arange(len(sums_B), device=flat.device) + BLOCK_WORDS
    return (torch.stack(sums_B) * _odd_multipliers(blocks_B)).sum() + flat.numel()


def device_checksum(infos: Sequence[TensorInfo], sums: Sequence[int]) -> str:
    """Return the hex checksum of a bucket: of names, dtypes, shapes and the tensors' `word_sum`."""
    described = [(i.name, i.dtype, tuple(i.shape), s) for i, s in zip(infos, sums, strict=True)]
    return hashlib.blake2b(repr(described).encode(), digest_size=16).hexdigest()


def checksum_of(infos: Sequence[TensorInfo], tensors: Sequence[Tensor]) -> str:
    """Return `device_checksum` of tensors of one device; transfers a few bytes from it, once."""
    return device_checksum(infos, torch.stack([word_sum(t) for t in tensors]).tolist())
