"""A step's sequences -> the micro-batches of one data-parallel rank.

Sequences are sorted by length and dealt to the data-parallel ranks in turn, so that micro-batch j
has the same shape on every rank (which the all-gather token dispatcher needs, and which balances
the ranks); a rank without a sequence for a slot gets an empty row. Rows are padded on the right:
under a causal mask padding is never seen, so no mask is built and no token id is special.

Shape legend: B rows, S positions, T completion tokens of a micro-batch, N tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl import messages


@dataclass(frozen=True, slots=True)
class Sequences:
    """All sequences of a step, flat; sequence i is tokens `[bounds[i], bounds[i + 1])`.

    Example: prompts [5, 6] and [7], completions [8] and [9, 2]:
    `Sequences(token_ids=[5, 6, 8, 7, 9, 2], bounds=[0, 3, 6], prompt_lengths=[2, 1])`.
    """

    token_ids: NDArray[np.int32]
    bounds: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]

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
    def of_batch(cls, batch: messages.Batch) -> Sequences:
        """The sequences of a batch message.

        Raises:
            ValueError: arrays whose lengths don't agree.
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
    """int64, padded with 0 on the right."""
    rows_T: Tensor
    """int64: row of the flattened hidden states [S * B] that predicts each completion token."""
    targets_T: Tensor
    """int64: the completion tokens."""
    source_T: Tensor
    """int64: flat position of each completion token in the step's arrays."""


def plan(
    lengths: NDArray[np.int64], ranks: int, max_tokens: int, multiple: int = 1
) -> list[tuple[int, list[list[int]]]]:
    """How the sequences of a step are divided: one entry per micro-batch, the same on all ranks.

    Args:
        lengths: tokens of each sequence.
        ranks: data-parallel size.
        max_tokens: padded tokens of a micro-batch, at most; one row is always allowed.
        multiple: padded lengths are multiples of it.

    Returns:
        (padded length, sequence indices by data-parallel rank) of each micro-batch, longest
        sequences first; every micro-batch has as many rows on each rank as its longest list.

    Example: `plan([5, 3, 4], 2, 8)` is `[(5, [[0], [2]]), (3, [[1], []])]`.
    """
    order = np.argsort(-lengths, kind="stable").tolist()
    out: list[tuple[int, list[list[int]]]] = []
    slot = 0
    while slot * ranks < len(order):
        longest = int(lengths[order[slot * ranks]])
        padded = -(-longest // multiple) * multiple
        rows = max(1, max_tokens // padded)
        chosen = order[slot * ranks : (slot + rows) * ranks]
        out.append((padded, [chosen[r::ranks] for r in range(ranks)]))
        slot += rows
    return out or [(multiple, [[] for _ in range(ranks)])]


def micro_batches(
    sequences: Sequences, rank: int, ranks: int, max_tokens: int, multiple: int = 1
) -> list[MicroBatch]:
    """The micro-batches of data-parallel rank `rank` of `ranks`; see `plan`."""
    out = []
    for padded, by_rank in plan(sequences.lengths, ranks, max_tokens, multiple):
        rows = max(1, max(len(indices) for indices in by_rank))
        tokens_BS = np.zeros((rows, padded), dtype=np.int64)
        predictors: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        sources: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        for b, index in enumerate(by_rank[rank]):
            first, last = sequences.bounds[index], sequences.bounds[index + 1]
            tokens_BS[b, : last - first] = sequences.token_ids[first:last]
            source = sequences.completion_positions(index)
            sources.append(source)
            # The hidden state at position t - 1 predicts token t; rows are position-major.
            predictors.append((source - first - 1) * rows + b)
        source_T = np.concatenate(sources)
        out.append(
            MicroBatch(
                tokens_BS=torch.from_numpy(tokens_BS),
                rows_T=torch.from_numpy(np.concatenate(predictors)),
                targets_T=torch.from_numpy(sequences.token_ids[source_T].astype(np.int64)),
                source_T=torch.from_numpy(source_T),
            )
        )
    return out
