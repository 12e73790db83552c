"""Division of a step into micro-batches: nothing lost, shapes alike on every rank."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_rl import messages
from megatron_rl.models import architecture, tiny
from megatron_rl.models.packing import MicroBatchRows, RowLayout, own_positions, plan_rows
from megatron_rl.trainer.batch import (
    MicroBatch,
    batch_of_examples,
    completion_positions,
    divide,
)

pairs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 31), min_size=1, max_size=6),
        st.lists(st.integers(0, 31), min_size=0, max_size=9),
    ),
    max_size=12,
)


ARCHITECTURE = architecture(tiny.CONFIGS["tiny_dense"])


def divided(
    batch: messages.Batch, layout: RowLayout, rank: int = 0, context_rank: int = 0
) -> list[MicroBatch]:
    return divide(batch, ARCHITECTURE, layout, rank, context_rank)


def test_worked_examples() -> None:
    two = RowLayout(ranks=2, max_tokens=8)
    assert plan_rows(np.array([5, 3, 4]), two) == [MicroBatchRows(7, 1, [[[0]], [[2, 1]]])]
    assert plan_rows(np.array([5, 3, 4]), RowLayout(ranks=2, max_tokens=6)) == [
        MicroBatchRows(5, 1, [[[0]], [[2]]]),
        MicroBatchRows(3, 1, [[[1]], []]),
    ]
    assert plan_rows(np.array([], dtype=np.int64), two) == [MicroBatchRows(1, 1, [[], []])]

    batch = batch_of_examples([([5, 6], [8]), ([7], [9, 2])])
    assert messages.ints(batch.bounds).tolist() == [0, 3, 6]
    (one,) = divided(batch, RowLayout(max_tokens=100, multiple=4))
    assert one.tokens_BS.tolist() == [[5, 6, 8, 7, 9, 2, 0, 0]]
    assert one.origin_BS.tolist() == [[0, 1, 2, 3, 4, 5, -1, -1]]
    assert one.bounds == (0, 3, 6, 8)  # the padding is a sequence too
    assert one.rows_T.tolist() == [1, 3, 4]
    assert one.targets_T.tolist() == [8, 9, 2]
    assert one.source_T.tolist() == [2, 4, 5]


def test_worked_examples_of_padded_rows() -> None:
    two = RowLayout(ranks=2, max_tokens=8, packed=False)
    assert plan_rows(np.array([5, 3, 4]), two) == [
        MicroBatchRows(5, 1, [[[0]], [[2]]]),
        MicroBatchRows(3, 1, [[[1]], []]),
    ]
    even = RowLayout(max_tokens=10, multiple=2, packed=False)
    assert plan_rows(np.array([5, 3, 4]), even) == [
        MicroBatchRows(6, 1, [[[0]]]),
        MicroBatchRows(4, 2, [[[2], [1]]]),
    ]
    assert plan_rows(np.array([], dtype=np.int64), two) == [MicroBatchRows(1, 1, [[], []])]

    batch = batch_of_examples([([5, 6], [8]), ([7], [9, 2])])
    (one,) = divided(batch, RowLayout(max_tokens=100, packed=False))
    assert one.tokens_BS.tolist() == [[5, 6, 8], [7, 9, 2]]
    # Position-major rows: token 8 at position 2 of row 0 is predicted by (1, 0) = 1 * 2 + 0.
    assert one.rows_T.tolist() == [1, 2, 3]
    assert one.targets_T.tolist() == [9, 8, 2]
    assert one.source_T.tolist() == [4, 2, 5]


def test_a_predictor_may_be_on_another_context_parallel_rank_than_its_token() -> None:
    # One sequence, padded to 8: rank 0 has positions 0, 1, 6, 7 and rank 1 has 2, 3, 4, 5.
    batch = batch_of_examples([([5, 6], [8, 7, 9, 2])])
    ranks = [divided(batch, RowLayout(context=2), 0, c)[0] for c in range(2)]
    assert ranks[0].tokens_BS.tolist() == [[5, 6, 0, 0]]
    assert ranks[1].tokens_BS.tolist() == [[8, 7, 9, 2]]
    assert (ranks[0].rows_T.tolist(), ranks[0].targets_T.tolist()) == ([1], [8])
    assert (ranks[1].rows_T.tolist(), ranks[1].targets_T.tolist()) == ([0, 1, 2], [7, 9, 2])


@given(
    pairs,
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.booleans(),
)
@example([([0], []), ([0], []), ([0], [0, 0])], 2, 2, 1, 1, True)
def test_every_completion_token_is_once_on_one_rank(
    examples: list[tuple[list[int], list[int]]],
    ranks: int,
    max_tokens: int,
    multiple: int,
    context: int,
    packed: bool,
) -> None:
    batch = batch_of_examples(examples)
    layout = RowLayout(
        ranks=ranks, max_tokens=max_tokens, packed=packed, multiple=multiple, context=context
    )
    by_rank = [divided(batch, layout, r, c) for r in range(ranks) for c in range(context)]
    shapes = [[m.tokens_BS.shape for m in own] for own in by_rank]
    assert all(own == shapes[0] for own in shapes)
    assert shapes[0]
    # One sequence, and what it is padded with, is always allowed; other ranks have its shape.
    alone = [
        any(len(m.bounds) <= 3 if packed else m.tokens_BS.shape[0] == 1 for m in micros)
        for micros in zip(*by_rank, strict=True)
    ]
    found: list[int] = []
    for own in by_rank:
        for micro, exempt in zip(own, alone, strict=True):
            rows, positions = micro.tokens_BS.shape
            assert positions % multiple == 0
            assert micro.bounds[-1] == positions * context
            assert exempt or rows * positions * context <= max_tokens
            found += micro.source_T.tolist()
            origin_R, tokens_R = micro.origin_BS.t().flatten(), micro.tokens_BS.t().flatten()
            assert (origin_R[micro.rows_T] + 1 == micro.source_T).all()
            assert (messages.ints(batch.token_ids)[micro.source_T] == micro.targets_T.numpy()).all()
            real = origin_R >= 0
            assert (messages.ints(batch.token_ids)[origin_R[real]] == tokens_R[real].numpy()).all()
            assert (tokens_R[~real] == 0).all()
    want = [p for i in range(len(examples)) for p in completion_positions(batch, i)]
    assert sorted(found) == want


@given(pairs, st.integers(1, 3), st.integers(20, 60), st.integers(1, 3))
def test_sequences_of_a_packed_row_start_at_its_bounds(
    examples: list[tuple[list[int], list[int]]], ranks: int, max_tokens: int, context: int
) -> None:
    batch = batch_of_examples(examples)
    layout = RowLayout(ranks=ranks, max_tokens=max_tokens, context=context)
    starts = []
    for r in range(ranks):
        parts = [divided(batch, layout, r, c) for c in range(context)]
        for micros in zip(*parts, strict=True):
            bounds = micros[0].bounds
            origin_S = np.full(bounds[-1], -2)
            for c, micro in enumerate(micros):
                assert micro.bounds == bounds
                origin_S[own_positions(bounds, c, context)] = micro.origin_BS[0]
            for a, b in itertools.pairwise(bounds):
                real = origin_S[a:b][origin_S[a:b] >= 0]
                starts += real[:1].tolist()
                assert (origin_S[a : a + len(real)] == np.arange(len(real)) + origin_S[a]).all()
                assert (origin_S[a + len(real) : b] == -1).all()
    assert sorted(starts) == messages.ints(batch.bounds)[:-1].tolist()


def test_order_is_deterministic_and_longest_first() -> None:
    slots = plan_rows(np.array([3, 9, 3, 9, 1]), RowLayout(max_tokens=1))
    assert [s.by_rank for s in slots] == [[[[1]]], [[[3]]], [[[0]]], [[[2]]], [[[4]]]]
    assert [s.length for s in slots] == [9, 9, 3, 3, 1]


@pytest.mark.parametrize("packed", [True, False])
def test_empty_micro_batches_fill_up_to_a_multiple_and_divide_nothing_anew(packed: bool) -> None:
    lengths = np.array([9, 8, 7, 6, 5])
    few = RowLayout(ranks=2, max_tokens=9, packed=packed)
    many = dataclasses.replace(few, count_multiple=4)
    slots = plan_rows(lengths, few)
    assert len(slots) == 3
    assert plan_rows(lengths, many) == [*slots, MicroBatchRows(1, 1, [[], []])]
    assert len(plan_rows(lengths[:0], many)) == 4


def test_packed_ranks_have_nearly_the_same_to_do() -> None:
    lengths = np.random.default_rng(0).integers(30, 60, 128)
    (slot,) = plan_rows(lengths, RowLayout(ranks=4, max_tokens=10**6))
    used = [sum(int(lengths[i]) for i in row) for (row,) in slot.by_rank]
    assert max(used) - min(used) <= 30
    assert slot.length == max(used)


@pytest.mark.parametrize(
    ("bounds", "prompts", "what"),
    [
        ([0, 3, 6], [1], "one prompt"),
        ([0, 3, 5], [1, 1], "6 token_ids for 5 tokens"),
        ([0, 3, 3, 6], [1, 1, 1], "within it"),
        ([0, 3, 6], [1, 4], "within it"),
        ([0, 3, 6], [0, 1], "at least one token"),
        ([1, 3, 6], [1, 1], "start at 0"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    bounds: list[int], prompts: list[int], what: str
) -> None:
    batch = msgspec.structs.replace(
        batch_of_examples([([1, 2], [3, 4, 5, 6])]),
        bounds=np.array(bounds, dtype="<i4").tobytes(),
        prompt_lengths=np.array(prompts, dtype="<i4").tobytes(),
    )
    with pytest.raises(ValueError, match=what):
        divided(batch, RowLayout())


def test_a_sequence_is_of_one_version_when_all_its_sampled_tokens_are() -> None:
    versions = np.array([-1, 6, 7, -1, 7, -1, 7, -1, -1, 7], dtype="<i4")
    batch = msgspec.structs.replace(
        batch_of_examples([([1], [2, 3]), ([1], [2, 3, 4]), ([1, 2], [3])]),
        step=7,
        versions=versions.tobytes(),
    )
    (micro,) = divided(batch, RowLayout())
    same = dict(zip(micro.source_T.tolist(), micro.same_version_T.tolist(), strict=True))
    # Of the first sequence a token is of version 6; forced ones (-1) neither count nor break.
    assert same == {1: False, 2: False, 4: True, 5: False, 6: True, 9: True}
    assert micro.versions_T.tolist() == versions[micro.source_T.numpy()].tolist()
