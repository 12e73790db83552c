"""Division of a step into micro-batches: nothing lost, shapes alike on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.policy.microbatch import Sequences, micro_batches, plan

pairs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 31), min_size=1, max_size=6),
        st.lists(st.integers(0, 31), min_size=0, max_size=9),
    ),
    max_size=12,
)


def test_worked_example() -> None:
    assert plan(np.array([5, 3, 4]), 2, 8) == [(5, [[0], [2]]), (3, [[1], []])]
    assert plan(np.array([5, 3, 4]), 1, 10, multiple=2) == [(6, [[0]]), (4, [[2, 1]])]
    assert plan(np.array([], dtype=np.int64), 2, 8) == [(1, [[], []])]

    sequences = Sequences.of_examples([([5, 6], [8]), ([7], [9, 2])])
    assert sequences.bounds.tolist() == [0, 3, 6]
    (one,) = micro_batches(sequences, 0, 1, 100)
    assert one.tokens_BS.tolist() == [[5, 6, 8], [7, 9, 2]]
    # Position-major rows: token 8 at position 2 of row 0 is predicted by (1, 0) = 1 * 2 + 0.
    assert one.rows_T.tolist() == [2, 1, 3]
    assert one.targets_T.tolist() == [8, 9, 2]
    assert one.source_T.tolist() == [2, 4, 5]


@given(pairs, st.integers(1, 4), st.integers(1, 40), st.sampled_from([1, 2]))
def test_every_completion_token_is_once_on_one_rank(
    examples: list[tuple[list[int], list[int]]], ranks: int, max_tokens: int, multiple: int
) -> None:
    sequences = Sequences.of_examples(examples)
    by_rank = [micro_batches(sequences, r, ranks, max_tokens, multiple) for r in range(ranks)]
    shapes = [[m.tokens_BS.shape for m in own] for own in by_rank]
    assert all(own == shapes[0] for own in shapes)
    assert shapes[0]
    found: list[int] = []
    for own in by_rank:
        for micro in own:
            rows, padded = micro.tokens_BS.shape
            assert padded % multiple == 0
            assert rows == 1 or rows * padded <= max_tokens
            found += micro.source_T.tolist()
            flat = micro.tokens_BS.t().reshape(-1)
            # The row that predicts a token is one position before the token itself.
            assert (flat[micro.rows_T + rows] == micro.targets_T).all()
    want = [p for i in range(len(examples)) for p in sequences.completion_positions(i)]
    assert sorted(found) == want


def test_order_is_deterministic_and_longest_first() -> None:
    lengths = np.array([3, 9, 3, 9, 1])
    assert plan(lengths, 1, 1) == [(9, [[1]]), (9, [[3]]), (3, [[0]]), (3, [[2]]), (1, [[4]])]


@pytest.mark.parametrize(
    ("bounds", "prompts", "what"),
    [
        ([0, 3, 6], [1], "1 prompt lengths for 2 sequences"),
        ([0, 3, 5], [1, 1], "don't divide 6 tokens"),
        ([0, 3, 3, 6], [1, 1, 1], "don't divide 6 tokens"),
        ([0, 3, 6], [1, 4], "sequence 1 has 3 tokens and a prompt of 4"),
        ([0, 3, 6], [0, 1], "sequence 0 has 3 tokens and a prompt of 0"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    bounds: list[int], prompts: list[int], what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        Sequences(np.arange(6, dtype=np.int32), np.array(bounds), np.array(prompts))
