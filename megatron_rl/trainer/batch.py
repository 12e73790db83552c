"""A step's sequences -> the micro-batches of one data-parallel rank.

Sequences are sorted by length and dealt to the data-parallel ranks in turn, so that micro-batch j
has the same shape on every rank (which the all-gather token dispatcher needs, and which balances
the ranks); a rank without a sequence for a slot gets an empty row. A packed row holds many
sequences, a padded row one. Padding comes after its sequence: under a causal mask it is never
seen, so no mask is built and no token id is special.

Shape legend: B rows, S positions of this rank, T completion tokens of a micro-batch, R = S * B, N
tokens of the step, L layers with experts, K experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl import messages
from megatron_rl.models import routed_experts
from megatron_rl.models.base import Architecture
from megatron_rl.models.packing import Bounds, own_positions


@dataclass(frozen=True, slots=True)
class Sequences:
    """All sequences of a step, flat; sequence i is tokens `[bounds[i], bounds[i + 1])`.

    Example: prompts [5, 6] and [7], completions [8] and [9, 2]:
    `Sequences(token_ids=[5, 6, 8, 7, 9, 2], bounds=[0, 3, 6], prompt_lengths=[2, 1])`.
    """

    token_ids: NDArray[np.int32]
    bounds: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    routes_NLK: routed_experts.Routes | None = None
    """Experts that the generator's routers chose."""

    def __post_init__(self) -> None:
        n, lengths = len(self.token_ids), self.lengths
        if len(self.prompt_lengths) != len(lengths):
            raise ValueError(
                f"{len(self.prompt_lengths)} prompt lengths for {len(lengths)} sequences: one per"
                " sequence is needed"
            )
        if self.bounds[0] != 0 or self.bounds[-1] != n or (lengths <= 0).any():
            raise ValueError(
                f"bounds {self.bounds.tolist()[:8]}... don't divide {n} tokens: they must start at"
                " 0, grow, and end at the number of tokens"
            )
        bad = (self.prompt_lengths < 1) | (self.prompt_lengths > lengths)
        if bad.any():
            i = int(bad.argmax())
            raise ValueError(
                f"sequence {i} has {lengths[i]} tokens and a prompt of {self.prompt_lengths[i]}: a"
                " prompt has at least one token and ends within the sequence"
            )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.diff(self.bounds)

    def completion_positions(self, index: int) -> NDArray[np.int64]:
        """Flat positions of the completion of sequence `index`."""
        start = self.bounds[index] + self.prompt_lengths[index]
        return np.arange(start, self.bounds[index + 1])

    @classmethod
    def of_batch(cls, batch: messages.Batch, architecture: Architecture) -> Sequences:
        """The sequences of a batch message for a model.

        Raises:
            ValueError: arrays whose lengths don't agree, or routes of another model.
        """
        ids = messages.ints(batch.token_ids)
        for name in ("advantages", "generator_logprobs", "loss_weights", "versions"):
            found = len(getattr(batch, name)) // 4
            if found != len(ids):
                raise ValueError(
                    f"batch of step {batch.step} has {found} {name} for {len(ids)} tokens: one per"
                    " token is needed"
                )
        return cls(
            token_ids=ids,
            bounds=messages.ints(batch.bounds).astype(np.int64),
            prompt_lengths=messages.ints(batch.prompt_lengths).astype(np.int64),
            routes_NLK=(
                routed_experts.decode(batch.routes, len(ids), architecture)
                if batch.routes
                else None
            ),
        )

    @classmethod
    def of_examples(cls, examples: Sequence[tuple[list[int], list[int]]]) -> Sequences:
        """The sequences of (prompt, completion) pairs."""
        flat = [t for prompt, completion in examples for t in (*prompt, *completion)]
        lengths = [len(prompt) + len(completion) for prompt, completion in examples]
        return cls(
            token_ids=np.asarray(flat, dtype=np.int32),
            bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            prompt_lengths=np.asarray([len(p) for p, _ in examples], dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass of one rank takes."""

    tokens_BS: Tensor
    """int64; padding is 0. Under context parallelism, this rank's positions of the rows."""
    bounds: Bounds
    """Where the sequences of a whole row lie; the same for all rows."""
    origin_BS: Tensor
    """int64: flat position of each token in the step's arrays; -1 for padding."""
    rows_T: Tensor
    """int64: row of the flattened hidden states [S * B] that predicts each completion token."""
    targets_T: Tensor
    """int64: the completion tokens."""
    source_T: Tensor
    """int64: flat position of each completion token in the step's arrays."""
    routes_RLK: Tensor | None = None
    """int16: experts that the generator's routers chose, `models.routes.UNKNOWN` for padding."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Micro-batch j of every data-parallel rank."""

    length: int
    """Positions of a row."""
    rows: int
    by_rank: list[list[list[int]]]
    """Sequences of each row of each rank; a rank may have fewer rows than `rows`: empty ones."""


@dataclass(frozen=True, slots=True)
class Division:
    """How a step is divided: what `plan` keeps to.

    Example: 2 data-parallel ranks, rows of 8 tokens: `Division(ranks=2, max_tokens=8)`.
    """

    ranks: int = 1
    """Data-parallel size."""
    max_tokens: int = 16384
    """Tokens of a micro-batch with its padding, at most; one sequence is always allowed."""
    packed: bool = True
    """A micro-batch is one row of many sequences, rather than one padded row for each."""
    multiple: int = 1
    """What the positions of a row on one context-parallel rank are a multiple of."""
    context: int = 1
    """Context-parallel size."""
    count_multiple: int = 1
    """What the number of micro-batches is a multiple of; empty ones fill up."""

    def sequence(self, length: int) -> int:
        """Positions of a sequence in a packed row."""
        return _up(length, 2 * self.context if self.context > 1 else 1)

    def row(self, length: int) -> int:
        """Positions of a row that holds so many."""
        c = self.context
        return _up(length, math.lcm(2 * c, c * self.multiple) if c > 1 else self.multiple)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def plan(lengths: NDArray[np.int64], division: Division) -> list[Slot]:
    """How the sequences of a step are divided: the same micro-batches on all ranks.

    Sequences go to the ranks in rounds, longest first; in a packed row the rank with the least so
    far takes the longest of a round.

    Example: `plan([5, 3, 4], Division(ranks=2, max_tokens=8))` is
    `[Slot(7, 1, [[[0]], [[2, 1]]])]`, and without packing
    `[Slot(5, 1, [[[0]], [[2]]]), Slot(3, 1, [[[1]], []])]`.
    """
    order, n = np.argsort(-lengths, kind="stable").tolist(), division.ranks
    rounds = [order[i : i + n] for i in range(0, len(order), n)]
    fill = _packed if division.packed else _padded
    slots = fill(rounds, lengths, division)
    missing = _up(max(1, len(slots)), division.count_multiple) - len(slots)
    return slots + [Slot(division.row(1), 1, [[] for _ in range(n)])] * missing


def _packed(rounds: list[list[int]], lengths: NDArray[np.int64], division: Division) -> list[Slot]:
    out: list[Slot] = []
    used: list[int] = [0] * division.ranks
    chosen: list[list[int]] = [[] for _ in used]
    for indices in rounds:
        # The rank with the least so far takes the longest of the round.
        takers = sorted(range(division.ranks), key=used.__getitem__)
        sizes = [division.sequence(int(lengths[i])) for i in indices]
        need = max(used[r] + size for r, size in zip(takers, sizes, strict=False))
        if any(used) and division.row(need) > division.max_tokens:
            out.append(_packed_slot(used, chosen, division))
            used, chosen = [0] * division.ranks, [[] for _ in used]
            takers = list(range(division.ranks))
        for r, i, size in zip(takers, indices, sizes, strict=False):
            used[r] += size
            chosen[r].append(i)
    return [*out, _packed_slot(used, chosen, division)] if any(used) else out


def _packed_slot(used: list[int], chosen: list[list[int]], division: Division) -> Slot:
    return Slot(division.row(max(used)), 1, [[row] if row else [] for row in chosen])


def _padded(rounds: list[list[int]], lengths: NDArray[np.int64], division: Division) -> list[Slot]:
    out: list[Slot] = []
    at = 0
    while at < len(rounds):
        length = division.row(int(lengths[rounds[at][0]]))
        chosen = rounds[at : at + max(1, division.max_tokens // length)]
        by_rank = [[[x[r]] for x in chosen if r < len(x)] for r in range(division.ranks)]
        out.append(Slot(length, len(chosen), by_rank))
        at += len(chosen)
    return out


def micro_batches(
    sequences: Sequences, division: Division, rank: int = 0, context_rank: int = 0
) -> list[MicroBatch]:
    """The micro-batches of a data-parallel and context-parallel rank; see `plan`."""
    # Index -1, which is padding, is the last entry of both.
    ids = np.append(sequences.token_ids, 0).astype(np.int64)
    predicts = np.zeros(len(ids), dtype=bool)
    for i in range(len(sequences.lengths)):
        predicts[sequences.completion_positions(i) - 1] = True
    out = []
    for slot in plan(sequences.lengths, division):
        rows = [_row(sequences, row, division, slot.length) for row in slot.by_rank[rank]]
        rows += [_row(sequences, [], division, slot.length)] * (slot.rows - len(rows))
        bounds = rows[0][0] if division.packed else (0, slot.length)
        own = own_positions(bounds, context_rank, division.context)
        origin_BS = np.stack([origin_S[own] for _, origin_S in rows])
        # Hidden states are position-major.
        origin_R = origin_BS.T.reshape(-1)
        rows_T = np.flatnonzero(predicts[origin_R])
        source_T = origin_R[rows_T] + 1
        out.append(
            MicroBatch(
                tokens_BS=torch.from_numpy(ids[origin_BS]),
                bounds=bounds,
                origin_BS=torch.from_numpy(origin_BS),
                rows_T=torch.from_numpy(rows_T),
                targets_T=torch.from_numpy(ids[source_T]),
                source_T=torch.from_numpy(source_T),
                routes_RLK=_routes(sequences, origin_R),
            )
        )
    return out


def _routes(sequences: Sequences, origin_R: NDArray[np.int64]) -> Tensor | None:
    if sequences.routes_NLK is None:
        return None
    found_RLK = sequences.routes_NLK[origin_R]
    found_RLK[origin_R < 0] = routed_experts.UNKNOWN
    return torch.from_numpy(found_RLK)


def _row(
    sequences: Sequences, indices: list[int], division: Division, length: int
) -> tuple[Bounds, NDArray[np.int64]]:
    """(bounds, flat position of each token) of a row; what is left over is a sequence too."""
    origin_S, bounds = np.full(length, -1), [0]
    for i in indices:
        first, last = sequences.bounds[i], sequences.bounds[i + 1]
        origin_S[bounds[-1] : bounds[-1] + last - first] = np.arange(first, last)
        bounds.append(bounds[-1] + division.sequence(int(last - first)))
    if bounds[-1] < length:
        bounds.append(length)
    return tuple(bounds), origin_S
