"""Where sequences lie in a row: packing, attention chunks and context parallelism in one notion.

A row's *bounds* (0, ..., S) cut its S positions into sequences; a padded row is one sequence, a
packed row several. Llama 4's chunks are finer bounds, and a context-parallel rank holds the first
and last halves of each sequence, so what it attends are *pieces* of the same bounds.

Shape legend: S positions of a row, over all context-parallel ranks; s those of one rank.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bounds = tuple[int, ...]
"""0, the end of each sequence, and S last."""


def refined(bounds: Bounds, chunk: int | None) -> Bounds:
    """Bounds with every sequence cut at multiples of `chunk` from its own start.

    Example: `refined((0, 5, 7), 2)` is `(0, 2, 4, 5, 7)`.
    """
    if chunk is None:
        return bounds
    starts = (s for a, b in itertools.pairwise(bounds) for s in range(a, b, chunk))
    return (*starts, bounds[-1])


def longest(bounds: Bounds) -> int:
    """Positions of the longest sequence."""
    return max(b - a for a, b in itertools.pairwise(bounds))


def own_positions(bounds: Bounds, rank: int, size: int) -> NDArray[np.int64]:
    """Positions [s] of the row that a context-parallel rank holds, ascending.

    Each sequence is cut into `2 * size` equal parts, of which rank r has parts r and
    `2 * size - 1 - r`: causal attention then costs all ranks the same.

    Example: `own_positions((0, 4, 12), 0, 2)` is `[0, 3, 4, 5, 10, 11]`.

    Raises:
        ValueError: a sequence whose length is no multiple of `2 * size`.
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
    """Positions of the row, counted from the start of each one's sequence."""
    starts = np.asarray(bounds[:-1])
    return positions - starts[np.searchsorted(starts, positions, side="right") - 1]


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a rank attends: runs of its queries, each with the keys from its sequence's start on.

    Piece i is the next `queries[i]` positions of this rank; its last query sees all its
    `keys[i]` keys, the one before it all but one, and so on.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    slots: NDArray[np.int64] | None
    """Where the keys of all pieces lie in the ranks' positions, joined in the order of ranks;
    None where every piece has the keys of its own queries: the two are cut alike then."""


@functools.lru_cache(maxsize=256)
def pieces(bounds: Bounds, chunk: int | None, rank: int, size: int) -> Pieces:
    """The pieces of a context-parallel rank; a key is seen within its sequence and chunk only."""
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
