"""From a step's batch to the parts of the ranks, and from a part to its micro-batches.

A part is a `messages.Batch` with the arrays of sequences complete, and of the arrays of tokens what
one rank uses, in the order of the batch; every rank finds out from `bounds` which tokens that are.
`plan_rows` (`models.packing`) divides the sequences; micro-batch j has the same shape on every
rank, as the MoE token dispatcher needs. Padding follows its sequence, so causal attention never
sees it: no mask is built and no token id is special.

Shape legend: B rows, S positions of this rank, R = S * B, T completion tokens of a micro-batch, N
tokens of the step, n of the part, L layers with experts, K experts of a token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl import messages
from megatron_rl.algorithm.losses.base import Tokens
from megatron_rl.models import routed_experts
from megatron_rl.models.base import Architecture
from megatron_rl.models.packing import Bounds, RowLayout, own_rows, plan_rows, share
from megatron_rl.trainer import world
from megatron_rl.trainer.shards import ModelShards

TOKEN_ARRAYS = ("token_ids", "advantages", "generator_logprobs", "loss_weights", "versions")
"""Fields of a batch with four bytes for each token; `routes` has more."""


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
    continues: Bounds = ()
    """Number of the sequence that each one continues, or -1 (`packing.share`); empty: none."""
    origin_BS: Tensor
    """int64, on the CPU: flat position of each token in the step's arrays; -1 for padding."""
    rows_T: Tensor
    """int64: row of the flattened hidden states [S * B] that predicts each completion token."""
    targets_T: Tensor
    source_T: Tensor
    """int64, on the CPU: flat position of each completion token in the step's arrays."""
    advantages_T: Tensor
    generator_logprobs_T: Tensor
    loss_weights_T: Tensor  # all normalization; 0 for tokens that are not trained
    sequences_T: Tensor
    """int64: number of each token's sequence in the step, which has `sequence_count`."""
    same_version_T: Tensor
    """bool: sampled, like all sampled tokens of its sequence, by the weights of this step."""
    versions_T: Tensor  # int32, on the CPU: weight version of each token; -1 for forced ones
    sequence_count: int
    experts_RLK: Tensor | None
    """int16, on the CPU: the generator's routed experts, `routed_experts.UNKNOWN` for padding."""
    old_logprobs_T: Tensor | None = None
    """Under an earlier policy of the trainer; None where the generator's are taken."""
    reference_logprobs_T: Tensor | None = None
    """Under the frozen reference policy, where the objective has a KL term."""
    logprobs_T: Tensor | None = None
    """Result of the newest pass, on the last pipeline stage; without gradient, as `entropy_T`."""
    entropy_T: Tensor | None = None

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


def layout_of(shards: ModelShards) -> RowLayout:
    """Return the rules by which a step's sequences are divided over the ranks of a model."""
    p, schedule = shards.run.parallel, shards.run.schedule
    return RowLayout(
        ranks=parallel_state.get_data_parallel_world_size(),
        max_tokens=schedule.micro_batch_tokens,
        packed=schedule.packing,
        multiple=p.tensor if p.sequence_parallel else 1,
        context=p.context,
        count_multiple=shards.micro_batch_multiple,
        shared_prompts=schedule.packing and shards.shares_prompts,
    )


def micro_batches_of(batch: messages.Batch, shards: ModelShards) -> list[MicroBatch]:
    """Return this rank's micro-batches of a batch, or of its part, as `divide`; collective.

    Raises:
        ValueError: arrays that don't fit together, or ids beyond the vocabulary.
    """
    return divide(
        batch,
        shards.architecture,
        layout_of(shards),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        device := world.device(),
        lambda values: shards.add_over_context(values.to(device)).cpu(),
    )


def check_routed_experts(batch: messages.Batch, shards: ModelShards) -> None:
    """Raise ValueError if the batch has routed experts and the run expects none, or vice versa."""
    if batch.token_ids and bool(batch.routes) != (shards.routing is not None):
        raise ValueError(
            f"the batch of step {batch.step} has {sum(map(len, batch.routes))} bytes of routed"
            f" experts, and algorithm.routing_replay is {shards.run.algorithm.routing_replay!r}:"
            " all roles need one configuration"
        )


def parts_of(batch: messages.Batch, layout: RowLayout) -> Iterator[messages.Batch]:
    """Yield the part of each data-parallel rank, and of each context-parallel rank within these.

    Raises:
        ValueError: arrays that don't fit together.
    """
    bounds, predicts = _checked_bounds(batch)
    _checked_tokens(batch, len(predicts) - 1)
    plan = plan_rows(np.diff(bounds), layout)
    for rank in range(layout.ranks):
        for context_rank in range(layout.context):
            rows = own_rows(plan, bounds, layout, rank, context_rank)
            yield _part(batch, bounds, _used_tokens(rows, predicts))


def divide(
    batch: messages.Batch,
    architecture: Architecture,
    layout: RowLayout,
    rank: int = 0,
    context_rank: int = 0,
    device: torch.device | str = "cpu",
    add_over_context: Callable[[Tensor], Tensor] = lambda values: values,
) -> list[MicroBatch]:
    """Return a rank's micro-batches of the whole batch or of the rank's part.

    `add_over_context` returns the sum of a tensor on the CPU over the context-parallel ranks.

    Raises:
        ValueError: arrays that don't fit together, or ids beyond the vocabulary.
    """
    bounds, predicts = _checked_bounds(batch)
    plan = plan_rows(np.diff(bounds), layout)
    rows = own_rows(plan, bounds, layout, rank, context_rank)
    used_n = _used_tokens(rows, predicts)
    whole = len(batch.token_ids) // 4 == bounds[-1]
    _checked_tokens(batch, int(bounds[-1]) if whole else len(used_n))
    part = _part(batch, bounds, used_n) if whole else batch
    ids, experts = _padded(part, architecture)
    sequence_n, sequences = np.searchsorted(bounds, used_n, side="right") - 1, len(bounds) - 1
    versions_n = messages.ints(part.versions)
    same_n = same_version(sequence_n, versions_n, part.step, sequences, add_over_context)
    per_token: dict[str, NDArray[Any]] = {
        "advantages_T": messages.floats(part.advantages),
        "generator_logprobs_T": messages.floats(part.generator_logprobs),
        "loss_weights_T": messages.floats(part.loss_weights),
        "sequences_T": sequence_n,
        "same_version_T": same_n,
    }
    out, continues = [], Bounds()
    for ends, origin_BS in rows:
        place_BS = np.where(origin_BS < 0, -1, np.searchsorted(used_n, origin_BS))
        if layout.shared_prompts:
            ends, continues, kept_S = share(ends, ids[place_BS[0]], predicts[origin_BS[0]])
            origin_BS, place_BS = origin_BS[:, kept_S], place_BS[:, kept_S]
        # Hidden states are position-major.
        origin_R, place_R = origin_BS.T.reshape(-1), place_BS.T.reshape(-1)
        rows_T = np.flatnonzero(predicts[origin_R])
        # The next token of the batch is of the same sequence, and so the next of the part.
        place_T = place_R[rows_T] + 1
        arrays = {name: values_n[place_T] for name, values_n in per_token.items()}
        arrays |= {"tokens_BS": ids[place_BS], "rows_T": rows_T, "targets_T": ids[place_T]}
        out.append(
            MicroBatch(
                **{name: torch.from_numpy(values).to(device) for name, values in arrays.items()},
                bounds=ends,
                continues=continues,
                origin_BS=torch.from_numpy(origin_BS),
                source_T=torch.from_numpy(origin_R[rows_T] + 1),
                versions_T=torch.from_numpy(versions_n[place_T]),
                sequence_count=sequences,
                experts_RLK=None if experts is None else torch.from_numpy(experts[place_R]),
            )
        )
    return out


def same_version(
    sequence_n: NDArray[np.int64],
    versions_n: NDArray[np.int32],
    step: int,
    sequences: int,
    add_over_context: Callable[[Tensor], Tensor] = lambda values: values,
) -> NDArray[np.bool_]:
    """Return which tokens were sampled, like all sampled ones of their sequence, by `step`.

    Forced tokens have version -1: they are not counted, and do not exclude their sequence.
    """
    sampled_n = versions_n >= 0
    other_n = sampled_n & (versions_n != step)
    others_s = torch.from_numpy(np.bincount(sequence_n[other_n], minlength=sequences))
    is_pure_s = add_over_context(others_s).numpy() == 0
    same_n: NDArray[np.bool_] = sampled_n & is_pure_s[sequence_n]
    return same_n


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


def _used_tokens(
    rows: list[tuple[Bounds, NDArray[np.int64]]], predicts: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the flat positions [n], ascending, of a rank's tokens and of those they predict."""
    held = np.concatenate([origin_BS[origin_BS >= 0] for _, origin_BS in rows])
    held = np.sort(held, kind="stable")  # fast: the positions of a sequence ascend
    is_cut = np.diff(held, append=-1) != 1
    return np.sort(np.concatenate([held, held[is_cut & predicts[held]] + 1]), kind="stable")


def _part(
    batch: messages.Batch, bounds: NDArray[np.int64], used_n: NDArray[np.int64]
) -> messages.Batch:
    arrays = {name: messages.ints(getattr(batch, name))[used_n].tobytes() for name in TOKEN_ARRAYS}
    routes = []
    if batch.routes:
        lengths, sizes = np.diff(bounds).tolist(), [len(data) for data in batch.routes]
        per_token = sizes[0] // lengths[0] if lengths else 0
        if sizes != [per_token * length for length in lengths]:
            raise ValueError(
                f"batch of step {batch.step}: routes of {sizes[:8]}... bytes for sequences of"
                f" {lengths[:8]}... tokens: each token of each sequence needs the same number"
            )
        first, last = np.searchsorted(used_n, bounds[:-1]), np.searchsorted(used_n, bounds[1:])
        for i in np.flatnonzero(first < last):
            rows = np.frombuffer(batch.routes[i], np.uint8).reshape(lengths[i], per_token)
            own = used_n[first[i] : last[i]] - bounds[i]
            routes.append(batch.routes[i] if len(own) == len(rows) else rows[own].tobytes())
        routes = routes or [b""]  # this rank has no token, and the step has routes
    return msgspec.structs.replace(batch, **arrays, routes=routes)


def _checked_bounds(batch: messages.Batch) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the bounds, and the positions [N + 1] whose next token is of their completion."""
    bounds = messages.ints(batch.bounds).astype(np.int64)
    prompt_lengths = messages.ints(batch.prompt_lengths).astype(np.int64)
    lengths = np.diff(bounds)
    fit = bounds[0] == 0 and len(prompt_lengths) == len(lengths)
    if not (fit and (prompt_lengths >= 1).all() and (prompt_lengths <= lengths).all()):
        raise ValueError(
            f"batch of step {batch.step}: prompts of {prompt_lengths.tolist()[:8]}... tokens in"
            f" sequences with the bounds {bounds.tolist()[:8]}...: bounds start at 0, and each"
            " sequence has one prompt, of at least one token, within it"
        )
    predicts = np.zeros(bounds[-1] + 1, dtype=bool)  # index -1 is padding
    for start, prompt, end in zip(bounds[:-1], prompt_lengths, bounds[1:], strict=True):
        predicts[start + prompt - 1 : end - 1] = True
    return bounds, predicts


def _checked_tokens(batch: messages.Batch, count: int) -> None:
    """Raise ValueError unless the arrays of tokens have so many entries."""
    for name in TOKEN_ARRAYS:
        if (entries := len(getattr(batch, name)) // 4) != count:
            raise ValueError(
                f"batch of step {batch.step} has {entries} {name} for {count} tokens: one per token"
                " is needed"
            )


def _padded(
    part: messages.Batch, architecture: Architecture
) -> tuple[NDArray[np.int64], routed_experts.RoutedExperts | None]:
    """Return the ids [n + 1] and experts [n + 1, L, K] of tokens; index -1 is padding."""
    ids, experts, last = messages.ints(part.token_ids), None, architecture.vocabulary - 1
    if len(ids) and not 0 <= ids.min() <= ids.max() <= last:
        raise ValueError(
            f"the batch of step {part.step} has token ids {ids.min()} to {ids.max()}: the model's"
            f" vocabulary is 0 to {last}; tokenizer and model don't belong together"
        )
    if part.routes:
        experts = routed_experts.decode(b"".join(part.routes), len(ids), architecture)
        padding = ((0, 1), (0, 0), (0, 0))
        experts = np.pad(experts, padding, constant_values=routed_experts.UNKNOWN)
    return np.append(ids, 0).astype(np.int64), experts
