"""From a batch's bytes to the micro-batches of one rank.

`plan_rows` (`models.packing`) divides the sequences; micro-batch j has the same shape on every
rank, as the MoE token dispatcher needs. Padding follows its sequence, so causal attention never
sees it: no mask is built and no token id is special.

Shape legend: B rows, S positions of this rank, R = S * B, T completion tokens of a micro-batch, N
tokens of the step, L layers with experts, K experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl import messages
from megatron_rl.algorithm.losses.base import Tokens
from megatron_rl.models import routed_experts
from megatron_rl.models.base import Architecture
from megatron_rl.models.packing import Bounds, RowLayout, own_positions, plan_rows
from megatron_rl.trainer import world
from megatron_rl.trainer.shards import ModelShards


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One forward pass of one rank: everything that its tokens carry from the batch to the loss.

    Example: two sequences of 3 tokens in one packed row, prompts of 2 and 1 tokens:
    `tokens_BS = [[5, 6, 8, 7, 9, 2]]`, `bounds = (0, 3, 6)`, `rows_T = [1, 3, 4]`,
    `targets_T = [8, 9, 2]`, `source_T = [2, 4, 5]`, `sequences_T = [0, 1, 1]`.
    """

    tokens_BS: Tensor
    """int64; padding is 0. Under context parallelism, this rank's positions of the rows."""
    bounds: Bounds
    """Boundaries of the sequences in a row over all context-parallel ranks; one for all rows."""
    origin_BS: Tensor
    """int64, on the CPU: flat position of each token in the step's arrays; -1 for padding."""
    rows_T: Tensor
    """int64: row of the flattened hidden states [S * B] that predicts each completion token."""
    targets_T: Tensor
    """int64: the completion tokens."""
    source_T: Tensor
    """int64, on the CPU: flat position of each completion token in the step's arrays."""
    advantages_T: Tensor
    generator_logprobs_T: Tensor
    loss_weights_T: Tensor
    """All normalization; 0 for tokens that are not trained."""
    sequences_T: Tensor
    """int64: number of each token's sequence in the step."""
    same_version_T: Tensor
    """bool: sampled, like all sampled tokens of its sequence, by the weights of this step."""
    sequence_count: int
    """Sequences of the whole step."""
    experts_RLK: Tensor | None
    """int16, on the CPU: the generator's routed experts, `routed_experts.UNKNOWN` for padding."""
    old_logprobs_T: Tensor | None = None
    """Under an earlier policy of the trainer; None where the generator's are taken."""
    reference_logprobs_T: Tensor | None = None
    """Under the frozen reference policy, where the objective has a KL term."""
    logprobs_T: Tensor | None = None
    """Result of the newest pass, on the last pipeline stage; without gradient."""
    entropy_T: Tensor | None = None
    """Entropy of each token's distribution in nats; as `logprobs_T`."""

    def tokens(
        self, logprobs_C: Tensor, entropy_C: Tensor | None, chunk: slice, old_is_current: bool
    ) -> Tokens:
        """Return the tokens of a chunk of T, with log-probs and entropies under the policy."""
        generator_C, reference_T = self.generator_logprobs_T[chunk], self.reference_logprobs_T
        old_C = generator_C if self.old_logprobs_T is None else self.old_logprobs_T[chunk]
        return Tokens(
            logprobs_T=logprobs_C,
            generator_logprobs_T=generator_C,
            old_logprobs_T=logprobs_C.detach() if old_is_current else old_C,
            advantages_T=self.advantages_T[chunk],
            loss_weights_T=self.loss_weights_T[chunk],
            sequences_T=self.sequences_T[chunk],
            sequences=self.sequence_count,
            entropy_T=entropy_C,
            reference_logprobs_T=None if reference_T is None else reference_T[chunk],
            complete=chunk == slice(None),
            add_over_ranks=ModelShards.add_over_context,
        )


def micro_batches_of(batch: messages.Batch, shards: ModelShards) -> list[MicroBatch]:
    """Return this rank's micro-batches of a batch.

    Raises:
        ValueError: arrays that don't fit together, or ids beyond the vocabulary.
    """
    p, schedule = shards.run.parallel, shards.run.schedule
    layout = RowLayout(
        ranks=parallel_state.get_data_parallel_world_size(),
        max_tokens=schedule.micro_batch_tokens,
        packed=schedule.packing,
        multiple=p.tensor if p.sequence_parallel else 1,
        context=p.context,
        count_multiple=shards.micro_batch_multiple,
    )
    rank = parallel_state.get_data_parallel_rank()
    context_rank = parallel_state.get_context_parallel_rank()
    return divide(batch, shards.architecture, layout, rank, context_rank, world.device())


def check_routed_experts(batch: messages.Batch, shards: ModelShards) -> None:
    """Raise ValueError if the batch has routed experts and the run expects none, or vice versa."""
    if batch.token_ids and bool(batch.routes) != (shards.routing is not None):
        raise ValueError(
            f"the batch of step {batch.step} has {len(batch.routes)} bytes of routed experts, and"
            f" algorithm.routing_replay is {shards.run.algorithm.routing_replay!r}: all roles need"
            " one configuration"
        )


def divide(
    batch: messages.Batch,
    architecture: Architecture,
    layout: RowLayout,
    rank: int = 0,
    context_rank: int = 0,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Return the micro-batches of a data-parallel and context-parallel rank.

    Raises:
        ValueError: arrays that don't fit together, or ids beyond the vocabulary.
    """
    bounds, prompt_lengths = _checked_bounds(batch)
    ids_N = _checked_ids(batch, architecture)
    lengths = np.diff(bounds)
    # Index -1 is padding: the last entry of all three.
    experts = None
    if batch.routes:
        experts_NLK = routed_experts.decode(batch.routes, len(ids_N), architecture)
        padding_1LK = np.full_like(experts_NLK[:1], routed_experts.UNKNOWN)
        experts = np.concatenate([experts_NLK, padding_1LK])
    ids = np.append(ids_N, 0).astype(np.int64)
    predicts = np.zeros(len(ids), dtype=bool)
    for i in range(len(lengths)):
        predicts[bounds[i] + prompt_lengths[i] - 1 : bounds[i + 1] - 1] = True
    per_token = {
        "advantages_T": messages.floats(batch.advantages),
        "generator_logprobs_T": messages.floats(batch.generator_logprobs),
        "loss_weights_T": messages.floats(batch.loss_weights),
        "sequences_T": np.repeat(np.arange(len(lengths)), lengths),
        "same_version_T": same_version(bounds, messages.ints(batch.versions), batch.step),
    }
    out = []
    for part in plan_rows(lengths, layout):
        rows = [_row(bounds, row, layout, part.length) for row in part.by_rank[rank]]
        rows += [_row(bounds, [], layout, part.length)] * (part.rows - len(rows))
        row_bounds = rows[0][0] if layout.packed else (0, part.length)
        own = own_positions(row_bounds, context_rank, layout.context)
        origin_BS = np.stack([origin_S[own] for _, origin_S in rows])
        # Hidden states are position-major.
        origin_R = origin_BS.T.reshape(-1)
        rows_T = np.flatnonzero(predicts[origin_R])
        source_T = origin_R[rows_T] + 1
        arrays = {name: values_N[source_T] for name, values_N in per_token.items()}
        arrays |= {"tokens_BS": ids[origin_BS], "rows_T": rows_T, "targets_T": ids[source_T]}
        out.append(
            MicroBatch(
                **{name: torch.from_numpy(values).to(device) for name, values in arrays.items()},
                bounds=row_bounds,
                origin_BS=torch.from_numpy(origin_BS),
                source_T=torch.from_numpy(source_T),
                sequence_count=len(lengths),
                experts_RLK=None if experts is None else torch.from_numpy(experts[origin_R]),
            )
        )
    return out


def same_version(bounds: NDArray[np.int64], versions: NDArray[np.int32], step: int) -> Tensor:
    """Return which tokens [N] were sampled, like all sampled ones of their sequence, by `step`.

    Forced tokens have version -1: they are not counted, and do not exclude their sequence.
    """
    sampled = versions >= 0
    other = (sampled & (versions != step)).astype(np.int64)
    others = np.add.reduceat(other, bounds[:-1]) if len(other) else other
    same_N: Tensor = sampled & (np.repeat(others, np.diff(bounds)) == 0)
    return same_N


def completion_positions(batch: messages.Batch, index: int) -> NDArray[np.int64]:
    """Return the flat positions of the completion of sequence `index`."""
    bounds = messages.ints(batch.bounds)
    start = bounds[index] + messages.ints(batch.prompt_lengths)[index]
    return np.arange(start, bounds[index + 1], dtype=np.int64)


def batch_of_examples(
    examples: Sequence[tuple[list[int], list[int]]], weight: float = 1.0
) -> messages.Batch:
    """Return the batch of (prompt, completion) pairs: advantage 1 and one weight everywhere.

    With the loss `reinforce` its objective is cross-entropy on the completions.
    """
    flat = [t for prompt, completion in examples for t in (*prompt, *completion)]
    lengths = [len(prompt) + len(completion) for prompt, completion in examples]
    ones_N, zeros_N = np.ones(len(flat), dtype="<f4"), np.zeros(len(flat), dtype="<f4")
    return messages.Batch(
        step=0,
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype("<i4").tobytes(),
        prompt_lengths=np.asarray([len(p) for p, _ in examples], dtype="<i4").tobytes(),
        token_ids=np.asarray(flat, dtype="<i4").tobytes(),
        advantages=ones_N.tobytes(),
        generator_logprobs=zeros_N.tobytes(),
        loss_weights=(ones_N * np.float32(weight)).tobytes(),
        versions=np.zeros(len(flat), dtype="<i4").tobytes(),
        probe=[],
    )


def _checked_bounds(batch: messages.Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    bounds = messages.ints(batch.bounds).astype(np.int64)
    prompt_lengths = messages.ints(batch.prompt_lengths).astype(np.int64)
    n, lengths, where = len(batch.token_ids) // 4, np.diff(bounds), f"batch of step {batch.step}"
    if len(prompt_lengths) != len(lengths):
        raise ValueError(
            f"{where}: {len(prompt_lengths)} prompt lengths for {len(lengths)} sequences: one per"
            " sequence is needed"
        )
    if bounds[0] != 0 or bounds[-1] != n or (lengths <= 0).any():
        raise ValueError(
            f"{where}: bounds {bounds.tolist()[:8]}... don't divide {n} tokens: they must start at"
            " 0, grow, and end at the number of tokens"
        )
    bad = (prompt_lengths < 1) | (prompt_lengths > lengths)
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(
            f"{where}: sequence {i} has {lengths[i]} tokens and a prompt of {prompt_lengths[i]}: a"
            " prompt has at least one token and ends within the sequence"
        )
    return bounds, prompt_lengths


def _checked_ids(batch: messages.Batch, architecture: Architecture) -> NDArray[np.int32]:
    ids = messages.ints(batch.token_ids)
    for name in ("advantages", "generator_logprobs", "loss_weights", "versions"):
        count = len(getattr(batch, name)) // 4
        if count != len(ids):
            raise ValueError(
                f"batch of step {batch.step} has {count} {name} for {len(ids)} tokens: one per"
                " token is needed"
            )
    vocabulary = architecture.vocabulary
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise ValueError(
            f"the batch of step {batch.step} has token ids {ids.min()} to {ids.max()}: the model's"
            f" vocabulary is 0 to {vocabulary - 1}; tokenizer and model don't belong together"
        )
    return ids


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
