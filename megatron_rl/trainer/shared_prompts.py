"""Rows in which the completions of one prompt share its positions.

    sequences   [p0 p1 p2 a0 a1] [p0 p1 p2 b0 b1]
    row         [p0 p1] [p2 a0] [p2 b0]         bounds (0, 2, 4, 6), continues (-1, 0, 0)

A run that continues another one attends that one's positions and its own, and its positions count
on from there. So a prompt passes the layers once for the whole group instead of once for each
completion. Its last token stays with each completion, whose first token it predicts; the last token
of a completion predicts nothing and is left out. Sums have another order; nothing else differs.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from megatron_rl.models.packing import Bounds

LEAST_SAVING = 0.2
"""Of the positions of a row: with less, attention to two runs costs tiny models more."""


def share(
    bounds: Bounds, ids_S: NDArray[np.int64], predicts_S: NDArray[np.bool_]
) -> tuple[Bounds, Bounds, NDArray[np.int64] | slice]:
    """Return (bounds, the run that each run continues or -1, index in S of each position).

    Args:
        bounds: of the sequences in a packed row of S positions.
        ids_S: tokens.
        predicts_S: True where the next token is of the completion; nowhere in padding.

    The second value is empty where that would save less than `LEAST_SAVING`.
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
