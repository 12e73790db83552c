"""The positions of sequences in a row: packing, attention chunks and context parallelism.

The *bounds* (0, ..., S) of a row divide its S positions into sequences: one in a padded row, many
in a packed row. Llama 4's chunks are finer bounds. A context-parallel rank holds two parts of each
sequence, and attends *pieces* of the bounds.

Shape legend: S positions of a row, over all context-parallel ranks; s those of one rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

Bounds = tuple[int, ...]  # 0, the end of each sequence, and S last


def refined(bounds: Bounds, chunk: int | None) -> Bounds:
    """Divide every sequence at multiples of `chunk` from its own start."""
    if chunk is None:
        return bounds
    starts = (s for a, b in itertools.pairwise(bounds) for s in range(a, b, chunk))
    return (*starts, bounds[-1])


def longest(bounds: Bounds) -> int:
    """Return the length of the longest sequence."""
    return max(b - a for a, b in itertools.pairwise(bounds))


def own_positions(bounds: Bounds, rank: int, size: int) -> NDArray[np.int64]:
    """Return the positions [s] of the row on a context-parallel rank, ascending.

    Each sequence is divided into `2 * size` equal parts; rank r has parts r and `2 * size - 1 - r`,
    so that causal attention costs all ranks the same.

    Example: `own_positions((0, 4, 12), 0, 2)` is `[0, 3, 4, 5, 10, 11]`. ValueError: a sequence
    cannot be divided so.
    """
    if size == 1:
        return np.arange(bounds[-1])
    out = []
    for start, stop in itertools.pairwise(bounds):
        part, rest = divmod(stop - start, 2 * size)
        if rest:
            raise ValueError(
                f"a sequence of {stop - start} positions cannot be divided over {size}"
                f" context-parallel ranks: pad it to a multiple of {2 * size}"
            )
        for i in (rank, 2 * size - 1 - rank):
            out.append(np.arange(start + i * part, start + (i + 1) * part))
    return np.concatenate(out)


def within_sequence(bounds: Bounds, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count positions of the row from the start of their sequence."""
    starts = np.asarray(bounds[:-1])
    return positions - starts[np.searchsorted(starts, positions, side="right") - 1]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The attention of a rank: runs of its queries, with the keys from the sequence's start.

    Piece i is the next `queries[i]` positions of this rank; its last query attends all of its
    `keys[i]` keys, the one before it all but one, and so on. `slots` is the index of the keys of
    all pieces in the positions of all ranks, joined in the order of ranks; None if every piece has
    the keys of its own queries.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    slots: NDArray[np.int64] | None


@functools.lru_cache(maxsize=256)
def pieces(
    bounds: Bounds, chunk: int | None, rank: int, size: int, continues: Bounds = ()
) -> Pieces:
    """Return the pieces of a context-parallel rank: attention within sequence and chunk.

    Raises:
        ValueError: sequences that continue others, with chunks or context parallelism.
    """
    if continues:
        if chunk is not None or size > 1:
            raise ValueError("shared prompts need attention without chunks on one rank")
        runs = [np.arange(a, b) for a, b in itertools.pairwise(bounds)]
        seen = [
            run if c < 0 else np.concatenate([runs[c], run])
            for c, run in zip(continues, runs, strict=True)
        ]
        return Pieces(tuple(map(len, runs)), tuple(map(len, seen)), np.concatenate(seen))
    fine = refined(bounds, chunk)
    if size == 1:
        lengths = tuple(b - a for a, b in itertools.pairwise(fine))
        return Pieces(lengths, lengths, None)
    own = own_positions(bounds, rank, size)
    joined = np.concatenate([own_positions(bounds, r, size) for r in range(size)])
    slot = np.empty_like(joined)
    slot[joined] = np.arange(len(joined))
    queries, keys, slots = [], [], []
    for start, stop in itertools.pairwise(fine):
        inside = own[np.searchsorted(own, start) : np.searchsorted(own, stop)]
        for run in np.split(inside, np.flatnonzero(np.diff(inside) != 1) + 1):
            if len(run):
                queries.append(len(run))
                keys.append(int(run[-1]) + 1 - start)
                slots.append(slot[start : run[-1] + 1])
    return Pieces(tuple(queries), tuple(keys), np.concatenate(slots))


LEAST_SAVING = 0.2
"""Least part of a row's positions that `share` saves; with less, tiny models lose."""


def share(
    bounds: Bounds, ids_S: NDArray[np.int64], predicts_S: NDArray[np.bool_]
) -> tuple[Bounds, Bounds, NDArray[np.int64] | slice]:
    """Let the completions of one prompt share its positions in a packed row.

        sequences   [p0 p1 p2 a0 a1] [p0 p1 p2 b0 b1]
        row         [p0 p1] [p2 a0] [p2 b0]         bounds (0, 2, 4, 6), continues (-1, 0, 0)

    A run that continues another one attends that one's positions and its own, and its positions
    count on from there. So a prompt passes the layers once for the whole group. Its last token
    stays with each completion, whose first token it predicts; the last token of a completion
    predicts nothing and is left out. Sums have another order; nothing else differs. `predicts_S` is
    True where the next token is of the completion.

    Returns (bounds, the run that each run continues or -1, index in S of each position). The second
    value is empty where that would save less than `LEAST_SAVING`.
    """
    groups: dict[bytes, list[tuple[int, int, int]]] = {}
    for start, stop in itertools.pairwise(bounds):
        last = start + int(predicts_S[start:stop].argmax())  # of the prompt
        key = ids_S[start : last + 1].tobytes() if last > start else f"{start}".encode()
        groups.setdefault(key, []).append((start, last, stop))
    runs, continues = list[NDArray[np.int64]](), list[int]()
    for group in groups.values():
        if len(group) == 1:
            runs.append(np.arange(group[0][0], group[0][2]))
            continues.append(-1)
            continue
        continues += [-1] + [len(runs)] * len(group)
        runs.append(np.arange(group[0][0], group[0][1]))
        runs += [np.arange(last, stop - 1) for _, last, stop in group]
    ends = (0, *itertools.accumulate(map(len, runs)))
    if ends[-1] > (1 - LEAST_SAVING) * bounds[-1]:
        return bounds, (), slice(None)
    return ends, tuple(continues), np.concatenate(runs)


def _copied(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return values on a device; a copy to a GPU does not wait for the work before it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass
class Rows(PackedSeqParams):
    """The positions of the sequences of a micro-batch; all its rows have the same bounds.

    `qkv_format` stays unset: positions restart through `Rotary`, not through Megatron's loop over
    sequences, so that activations keep the shape [s, b, h] whether rows are packed or padded.
    """

    bounds: Bounds = ()  # of a whole row, over all context-parallel ranks
    positions_s: Tensor = field(default_factory=torch.Tensor)
    """int64: position of each of this rank's tokens within its sequence."""
    continues: Bounds = ()
    """Number of the sequence that each one continues (its prompt), or -1; empty: none does."""
    _thd: dict[tuple[int | None, int], PackedSeqParams] = field(default_factory=dict)
    _slots: dict[int | None, Tensor] = field(default_factory=dict)

    @classmethod
    def of_bounds(
        cls, bounds: Bounds, rank: int, size: int, device: torch.device, continues: Bounds = ()
    ) -> Rows:
        """Return rows of these bounds on context-parallel rank `rank` of `size`."""
        own = within_sequence(bounds, own_positions(bounds, rank, size))
        if continues:
            lengths = np.diff(bounds)
            own += np.repeat([0 if c < 0 else lengths[c] for c in continues], lengths)
        return cls(bounds=bounds, positions_s=_copied(own, device), continues=continues)

    @functools.cached_property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return longest(self.bounds)

    def slots(self, chunk: int | None, pieces: Pieces) -> Tensor:
        """Return the slots of a rank's pieces, on its device; copied once for all layers."""
        if chunk not in self._slots:
            assert pieces.slots is not None
            self._slots[chunk] = _copied(pieces.slots, self.positions_s.device)
        return self._slots[chunk]

    def thd(self, chunk: int | None, rows: int) -> PackedSeqParams:
        """Return Transformer Engine's parameters for `rows` consecutive rows, in chunks."""
        if (chunk, rows) not in self._thd:
            fine = refined(self.bounds, chunk)
            ends = [row * fine[-1] + end for row in range(rows) for end in fine[1:]]
            ends_n = _copied(np.array([0, *ends], np.int32), self.positions_s.device)
            # The same object for "padded" means no padding between the sequences.
            ends_of = dict.fromkeys(("q", "kv", "q_padded", "kv_padded"), ends_n)
            options: dict[str, Any] = {f"cu_seqlens_{k}": ends for k, ends in ends_of.items()}
            options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest(fine))
            thd = self._thd[chunk, rows] = PackedSeqParams("thd", **options)
            thd.pad_between_seqs = False  # no field of megatron-core 0.18
        return self._thd[chunk, rows]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Rules by which the sequences of a step become rows of micro-batches (`plan_rows`)."""

    ranks: int = 1
    max_tokens: int = 16384  # of a micro-batch, padding included; one sequence is always allowed
    packed: bool = True
    """One row of many sequences per micro-batch, rather than one padded row per sequence."""
    multiple: int = 1  # the positions of a row on one context-parallel rank are a multiple of this
    context: int = 1
    count_multiple: int = 1  # pad the number of micro-batches to a multiple of this with empty ones
    shared_prompts: bool = False
    """Completions of one prompt in a packed row share its positions; rows get shorter by that."""

    def sequence(self, length: int) -> int:
        """Return the positions that a sequence takes in a packed row."""
        return _round_up(length, 2 * self.context if self.context > 1 else 1)

    def row(self, length: int) -> int:
        """Return the positions of a row that holds `length` tokens."""
        c = self.context
        return _round_up(length, math.lcm(2 * c, c * self.multiple) if c > 1 else self.multiple)


@dataclass(frozen=True, slots=True)
class MicroBatchRows:
    """Micro-batch j of every data-parallel rank: the sequences of each row of each rank.

    Rows have `length` positions; a rank with fewer rows than `rows` gets empty ones.
    """

    length: int
    rows: int
    by_rank: list[list[list[int]]]


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def plan_rows(lengths: NDArray[np.int64], layout: RowLayout) -> list[MicroBatchRows]:
    """Divide a step's sequences into micro-batches of the same shapes on all ranks.

    Sequences are dealt to the ranks in rounds, longest first. Example: `plan_rows([5, 3, 4],
    RowLayout(ranks=2, max_tokens=8))` is `[MicroBatchRows(7, 1, [[[0]], [[2, 1]]])]`, and without
    packing `[MicroBatchRows(5, 1, [[[0]], [[2]]]), MicroBatchRows(3, 1, [[[1]], []])]`.
    """
    order, n = np.argsort(-lengths, kind="stable").tolist(), layout.ranks
    rounds = [order[i : i + n] for i in range(0, len(order), n)]
    fill = _packed_rows if layout.packed else _padded_rows
    micro_batches = fill(rounds, lengths, layout)
    count = _round_up(max(1, len(micro_batches)), layout.count_multiple)
    empty = MicroBatchRows(layout.row(1), 1, [[] for _ in range(n)])
    return micro_batches + [empty] * (count - len(micro_batches))


def _packed_rows(
    rounds: list[list[int]], lengths: NDArray[np.int64], layout: RowLayout
) -> list[MicroBatchRows]:
    out: list[MicroBatchRows] = []
    used: list[int] = [0] * layout.ranks
    chosen: list[list[int]] = [[] for _ in used]

    def close_row() -> None:
        rows = [[row] if row else [] for row in chosen]
        out.append(MicroBatchRows(layout.row(max(used)), 1, rows))

    for indices in rounds:
        # The rank with the fewest tokens takes the longest sequence of the round.
        takers = sorted(range(layout.ranks), key=used.__getitem__)
        sizes = [layout.sequence(int(lengths[i])) for i in indices]
        need = max(used[r] + size for r, size in zip(takers, sizes, strict=False))
        if any(used) and layout.row(need) > layout.max_tokens:
            close_row()
            used, chosen = [0] * layout.ranks, [[] for _ in used]
            takers = list(range(layout.ranks))
        for r, i, size in zip(takers, indices, sizes, strict=False):
            used[r] += size
            chosen[r].append(i)
    if any(used):
        close_row()
    return out


def _padded_rows(
    rounds: list[list[int]], lengths: NDArray[np.int64], layout: RowLayout
) -> list[MicroBatchRows]:
    out, start = [], 0
    while start < len(rounds):
        length = layout.row(int(lengths[rounds[start][0]]))
        chosen = rounds[start : start + max(1, layout.max_tokens // length)]
        by_rank = [[[x[r]] for x in chosen if r < len(x)] for r in range(layout.ranks)]
        out.append(MicroBatchRows(length, len(chosen), by_rank))
        start += len(chosen)
    return out


def own_rows(
    plan: list[MicroBatchRows],
    bounds: NDArray[np.int64],
    layout: RowLayout,
    rank: int,
    context_rank: int,
) -> list[tuple[Bounds, NDArray[np.int64]]]:
    """Return the rows of each micro-batch of a rank: (bounds of a row, token positions [B, s]).

    A position counts from the start of the step, whose sequences have the boundaries `bounds`; that
    of padding is -1.
    """
    out = []
    for part in plan:
        rows = [_row(bounds, row, layout, part.length) for row in part.by_rank[rank]]
        rows += [_row(bounds, [], layout, part.length)] * (part.rows - len(rows))
        row_bounds = rows[0][0] if layout.packed else (0, part.length)
        own = own_positions(row_bounds, context_rank, layout.context)
        out.append((row_bounds, np.stack([origin_S[own] for _, origin_S in rows])))
    return out


def _row(
    bounds: NDArray[np.int64], indices: list[int], layout: RowLayout, length: int
) -> tuple[Bounds, NDArray[np.int64]]:
    """Return (bounds, flat position of each token) of a row; leftover padding is a sequence too."""
    origin_S, row_bounds = np.full(length, -1), [0]
    for i in indices:
        first, last = bounds[i], bounds[i + 1]
        origin_S[row_bounds[-1] : row_bounds[-1] + last - first] = np.arange(first, last)
        row_bounds.append(row_bounds[-1] + layout.sequence(int(last - first)))
    if row_bounds[-1] < length:
        row_bounds.append(length)
    return tuple(row_bounds), origin_S
