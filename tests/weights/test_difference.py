"""Differences of two versions are exact for every dtype and gap, and refused where they must be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.weights import difference

WORDS = 400_000
ALL = 8 + 4 * WORDS
"""Bytes of a difference in which everything changed."""
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)


def changed(old: torch.Tensor, new: torch.Tensor, most: int = ALL) -> tuple[np.ndarray, int]:
    """Return (what the difference makes of `old`, its bytes)."""
    made = difference.encode(old, new, most)
    assert made is not None
    bucket = old.numpy().copy()
    difference.apply(bucket, made.numpy())
    return bucket, made.numel()


@given(
    st.sampled_from(DTYPES),
    st.sets(st.integers(0, WORDS // 2 - 1), max_size=30),
    st.integers(0, 2**31),
)
def test_every_dtype_is_exact(dtype, places, seed):
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(WORDS // 2, generator=generator) * 0.02).to(dtype)
    old = values.view(torch.uint8)
    new = values.clone()
    flat = new.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
    for place in places:  # the low word of an fp32 value alone, or the whole of it
        flat[place] = flat[place] ^ 1 if seed % 2 else -flat[place]
    bucket, _ = changed(old, new.view(torch.uint8))
    assert np.array_equal(bucket, new.view(torch.uint8).numpy())


@given(st.sets(st.integers(0, WORDS - 1), max_size=12))
def test_any_gap_is_bridged(places):
    old = torch.zeros(WORDS, dtype=torch.int16)
    new = old.clone()
    new[sorted(places)] = torch.arange(1, len(places) + 1, dtype=torch.int16)
    bucket, size = changed(old.view(torch.uint8), new.view(torch.uint8))
    assert np.array_equal(bucket, new.view(torch.uint8).numpy())
    steps = np.diff([-1, *sorted(places)])
    assert size == 8 + 4 * int((-(-steps // 2**16)).sum())


def test_gaps_at_the_limit_of_16_bits_and_several_limits_long():
    old = torch.zeros(WORDS, dtype=torch.int16)
    for places, words in [
        ([0], 1),
        ([65_535], 1),
        ([65_536], 2),
        ([0, 65_536], 2),
        ([0, 65_537], 3),
        ([131_071], 2),
        ([131_072], 3),
        ([WORDS - 1], 7),
        ([3, 200_000, 200_001, WORDS - 1], 1 + 4 + 1 + 4),
    ]:
        new = old.clone()
        new[places] = 7
        bucket, size = changed(old.view(torch.uint8), new.view(torch.uint8))
        assert np.array_equal(bucket, new.view(torch.uint8).numpy()), places
        assert size == 8 + 4 * words, places


def test_nothing_changed_is_an_empty_difference_and_too_much_is_none():
    old = torch.zeros(1024, dtype=torch.int16)
    new = old.clone()
    assert changed(old.view(torch.uint8), new.view(torch.uint8), 8)[1] == 8
    new[::2] = 1  # 512 words
    pair = old.view(torch.uint8), new.view(torch.uint8)
    assert changed(*pair, 8 + 4 * 512)[1] == 8 + 4 * 512
    assert difference.encode(*pair, 8 + 4 * 512 - 1) is None
    far = torch.zeros(WORDS, dtype=torch.int16)
    last = far.clone()
    last[-1] = 1  # one word, and six more over the gap
    assert difference.encode(far.view(torch.uint8), last.view(torch.uint8), 8 + 4 * 6) is None


def test_a_bucket_that_changed_all_over_is_compared_at_its_start_alone(monkeypatch):
    compared: list[int] = []

    def counted(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        compared.append(old.numel())
        return old.ne(new)

    monkeypatch.setattr(difference, "_PIECE", 1000)
    monkeypatch.setattr(torch, "ne", counted)
    old = torch.zeros(WORDS, dtype=torch.int16).view(torch.uint8)
    new = torch.ones(WORDS, dtype=torch.int16).view(torch.uint8)
    assert difference.encode(old, new, 4 * 1500) is None
    assert compared == [1000, 1000]
    few = torch.zeros(WORDS, dtype=torch.int16)
    few[[0, 999, 1000, WORDS - 1]] = 7
    compared.clear()
    bucket, _ = changed(old, few.view(torch.uint8))
    assert np.array_equal(bucket, few.view(torch.uint8).numpy())
    assert sum(compared) == WORDS


def test_what_is_no_difference_of_this_bucket_is_refused():
    old = torch.zeros(1024, dtype=torch.int16)
    new = old.clone()
    new[[5, 1023]] = 1
    made = difference.encode(old.view(torch.uint8), new.view(torch.uint8), ALL)
    assert made is not None
    data = made.numpy()
    negative = data.copy()
    negative[:8].view(np.int64)[0] = -1
    bucket = np.zeros(2048, dtype=np.uint8)
    for wrong in (data[:-1], data[:7], data[:0], np.append(data, data), negative):
        with pytest.raises(ValueError, match="are not a difference of"):
            difference.apply(bucket, wrong)
    with pytest.raises(ValueError, match="word 1023 is beyond the bucket's 1000 words"):
        difference.apply(bucket[:2000], data)
    assert not bucket.any()
