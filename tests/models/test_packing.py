"""Bounds, chunks and context-parallel shares agree with the plain definition of who sees whom."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.models.packing import longest, own_positions, pieces, refined, within_sequence

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)
chunks = st.sampled_from([None, 1, 3, 4, 100])


def bounds_of(lengths: list[int], multiple: int = 1) -> tuple[int, ...]:
    return (0, *np.cumsum([n * multiple for n in lengths]).tolist())


def test_worked_examples() -> None:
    assert refined((0, 5, 7), 2) == (0, 2, 4, 5, 7)
    assert refined((0, 5, 7), None) == (0, 5, 7)
    assert longest((0, 5, 7)) == 5
    assert own_positions((0, 4, 12), 0, 2).tolist() == [0, 3, 4, 5, 10, 11]
    assert own_positions((0, 4, 12), 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    assert within_sequence((0, 4, 12), np.array([0, 3, 4, 11])).tolist() == [0, 3, 0, 7]
    # Rank 0 of 2 has positions 0 and 3 of one sequence: the second sees all four keys.
    cut = pieces((0, 4), None, 0, 2)
    assert (cut.queries, cut.keys) == ((1, 1), (1, 4))


def test_a_sequence_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="6 positions cannot be divided over 2"):
        own_positions((0, 6), 0, 2)


@given(lengths, chunks, st.integers(1, 4))
def test_pieces_are_causal_attention_within_sequences_and_chunks(
    lengths: list[int], chunk: int | None, size: int
) -> None:
    bounds = bounds_of(lengths, 2 * size if size > 1 else 1)
    at = np.arange(bounds[-1])
    sequence = np.searchsorted(bounds, at, side="right")
    inside = within_sequence(bounds, at)
    part = inside // (chunk or bounds[-1])
    want = (at[:, None] >= at) & (sequence[:, None] == sequence) & (part[:, None] == part)

    own = [own_positions(bounds, r, size) for r in range(size)]
    assert sorted(np.concatenate(own).tolist()) == at.tolist()
    joined, seen = np.concatenate(own), np.zeros_like(want)
    for rank in range(size):
        cut = pieces(bounds, chunk, rank, size)
        slots = np.arange(bounds[-1]) if cut.slots is None else cut.slots
        q = k = 0
        for queries, keys in zip(cut.queries, cut.keys, strict=True):
            for i in range(queries):
                visible = slots[k : k + keys - (queries - 1 - i)]
                seen[own[rank][q + i], joined[visible]] = True
            q, k = q + queries, k + keys
        assert (q, k) == (len(own[rank]), len(slots))
    assert (seen == want).all()
