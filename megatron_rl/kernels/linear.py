"""The head and a policy loss in chunks over tokens: [T, V] never exists.

    one pass    logits -> row kernel (log-prob, entropy, coefficient, gradient in place) -> hidden
                and weight gradient: three products, nothing computed twice. For losses whose
                derivative by a token's log-prob follows from that log-prob alone.
    two passes  log-probs of all tokens first; the coefficients arrive with the backward pass, which
                makes the logits again: four products. For everything else.

Under tensor parallelism each rank holds V columns of the vocabulary; per chunk the ranks exchange
16 bytes per token, and the hidden gradient is summed over them in fp32, once. Temperature divides
the logits. Shape legend: T tokens, C tokens of a chunk, H hidden, V vocabulary of this rank,
R tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.kernels import heads

CHUNK_BYTES = {"cpu": 136 * 2**20, "cuda": 3175 * 2**20}
"""Default memory budget of the chunk's logits per device type."""
CPU_ROWS, CPU_LOGITS = 256, 2**18
"""Most tokens of a chunk on CPU by default, unless its logits are few: more gain nothing."""

Coefficients = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(log-probs [C], their place in T) -> (loss terms [C], derivative of the loss by log-prob [C])."""


@dataclass(frozen=True, slots=True)
class Cispo:
    """Inputs of CISPO, fp32 [T] each: L = sum -w min(ratio, cap) A log p, the ratio held fixed."""

    generator_logprobs_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    max_ratio: float


@dataclass(frozen=True, slots=True)
class Plan:
    """How one call computes."""

    temperature: float
    vocabulary: int
    """Real tokens of the whole vocabulary; later columns of the head are padding."""
    group: dist.ProcessGroup | None
    """Tensor-parallel group whose ranks hold the vocabulary's shards in order; None: one shard."""
    precision: heads.Precision
    logit_grads: heads.LogitGrads
    chunk_bytes: int | None
    """Budget of the chunk's logits; None: `CHUNK_BYTES`."""


class Pass(NamedTuple):
    """What a pass over all tokens leaves; gradients are None where they were not asked for."""

    rows_5T: Tensor
    """log-prob, entropy, ratio (0 for other losses), coefficient, loss term."""
    hidden_grad_TH: Tensor | None
    """Of the operands' type, summed over the tensor-parallel ranks."""
    weight_grad_VH: Tensor | None
    """fp32, of this rank's shard."""


def row_stride(V: int, device: str) -> int:
    """Distance between rows of a chunk's logits, in numbers."""
    # Rows a multiple of the page apart would meet in the same cache sets on CPU; cuBLASLt wants
    # rows without gaps, and 16-byte aligned.
    return (V + 63) // 64 * 64 + 64 if device == "cpu" else (V + 7) // 8 * 8


def chunk_rows(stride: int, device: str, budget: int | None, upcasts: bool = False) -> int:
    """Tokens of a chunk: what the budget in bytes holds, in whole blocks of 32 if it can be."""
    rows = (CHUNK_BYTES[device] if budget is None else budget) // (4 * stride)
    if budget is None and device == "cpu":
        # Upcasts of bf16 operands take memory of their own.
        rows = min(rows, max(CPU_ROWS // 2 if upcasts else CPU_ROWS, CPU_LOGITS // stride))
    return max(1, rows // 32 * 32 or rows)


class _Chunks:
    """The shared walk: checks, shard bounds, chunk size and the two buffers."""

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, plan: Plan) -> None:
        T, H = hidden_TH.shape
        V = weight_VH.shape[0]
        if weight_VH.shape[1] != H or hidden_TH.dtype != weight_VH.dtype:
            raise ValueError(
                f"hidden states are {hidden_TH.dtype} {list(hidden_TH.shape)}, the head is"
                f" {weight_VH.dtype} {list(weight_VH.shape)}: type and width must agree"
            )
        if targets_T.shape != (T,) or targets_T.dtype != torch.int64:
            raise ValueError(
                f"targets are {targets_T.dtype} {list(targets_T.shape)}: int64 [{T}] is needed"
            )
        if not plan.temperature > 0:
            raise ValueError(f"temperature is {plan.temperature}: it must be positive")
        self.group = plan.group if plan.group is not None and plan.group.size() > 1 else None
        rank, size = (self.group.rank(), self.group.size()) if self.group else (0, 1)
        if not 0 < plan.vocabulary <= V * size:
            raise ValueError(
                f"vocabulary is {plan.vocabulary}: the head has {V} rows on each of {size} ranks"
            )
        self.first = rank * V
        self.columns = min(max(plan.vocabulary - self.first, 0), V)
        self.scale = 1.0 / plan.temperature
        device = hidden_TH.device
        self.head, self.grad_dtype = heads.select(
            plan.precision, plan.logit_grads, hidden_TH.dtype, device.type
        )
        self.bf16 = self.grad_dtype == torch.bfloat16
        stride = row_stride(V, device.type)
        upcasts = isinstance(self.head, heads.Upcast) and hidden_TH.dtype == torch.bfloat16
        rows = chunk_rows(stride, device.type, plan.chunk_bytes, upcasts)
        self.rows = max(1, min(rows, T))
        self.T, self.V = T, V
        self.logits_CV = hidden_TH.new_empty(self.rows, stride, dtype=torch.float32)
        self.hidden_TH = hidden_TH if hidden_TH.stride(1) == 1 else hidden_TH.contiguous()
        self.weight_VH = weight_VH if weight_VH.stride(1) == 1 else weight_VH.contiguous()
        self.targets_T = targets_T.contiguous()

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(place in T, logits [C, V], the view where their gradient will be [C, V])."""
        for begin in range(0, self.T, self.rows):
            place = slice(begin, min(begin + self.rows, self.T))
            n = place.stop - begin
            logits_CV = self.logits_CV[:n, : self.V]
            self.head.logits(self.hidden_TH[place], self.weight_VH, logits_CV)
            grads_CV = logits_CV
            if self.bf16:
                grads_CV = self.logits_CV[:n].view(torch.bfloat16)[:, : self.V]
            yield place, logits_CV, grads_CV

    def statistics(self, place: slice, logits_CV: Tensor) -> Tensor:
        """[4, C] over the whole vocabulary: log-prob, entropy, largest logit, sum of e^d."""
        ops = torch.ops.megatron_rl
        stats_4C = ops.row_stats(
            logits_CV, self.targets_T[place], self.first, self.columns, self.scale
        )
        stats_R4C = stats_4C[None]
        if self.group is not None:
            R, C = self.group.size(), stats_4C.shape[1]
            gathered = stats_4C.new_empty(R * 4, C)
            dist.all_gather_into_tensor(gathered, stats_4C, group=self.group)
            stats_R4C = gathered.view(R, 4, C)
        merged_4C: Tensor = ops.merge_rows(stats_R4C, self.scale)
        return merged_4C

    def to_gradients(
        self, place: slice, logits_CV: Tensor, top_C: Tensor, mass_C: Tensor, c_C: Tensor
    ) -> None:
        """Logits become c scale (onehot - p), as fp32 or bf16."""
        torch.ops.megatron_rl.row_grads_(
            *(logits_CV, self.targets_T[place], self.first, self.columns, self.scale),
            *(top_C.contiguous(), mass_C.contiguous(), c_C.contiguous(), self.bf16),
        )


class _Gradients:
    """Accumulates the two gradients over chunks."""

    def __init__(
        self, chunks: _Chunks, hidden: bool, weight: bool, weight_grad_VH: Tensor | None
    ) -> None:
        self.chunks = chunks
        shape, h = chunks.hidden_TH.shape, chunks.hidden_TH
        self.sum_TH = self.grad_TH = self.part_CH = None
        if hidden and (chunks.group is not None or h.dtype == torch.float32):
            self.sum_TH = h.new_empty(shape, dtype=torch.float32)
        elif hidden:
            self.grad_TH = torch.empty_like(h, memory_format=torch.contiguous_format)
            if not chunks.head.narrow_hidden_grad:
                self.part_CH = h.new_empty(chunks.rows, shape[1], dtype=torch.float32)
        self.weight_VH: Tensor | None = None
        self.started = weight_grad_VH is not None
        if weight:
            self.weight_VH = weight_grad_VH
            if self.weight_VH is None:
                # Nothing to add to: the first chunk writes it. Without chunks it is 0.
                make = torch.empty if chunks.T else torch.zeros
                self.weight_VH = make(chunks.weight_VH.shape, dtype=torch.float32, device=h.device)

    def add(self, place: slice, grads_CV: Tensor) -> None:
        c = self.chunks
        if self.sum_TH is not None:
            c.head.hidden_grad(grads_CV, c.weight_VH, self.sum_TH[place])
        elif self.part_CH is not None and self.grad_TH is not None:
            part_CH = self.part_CH[: place.stop - place.start]
            c.head.hidden_grad(grads_CV, c.weight_VH, part_CH)
            self.grad_TH[place] = part_CH
        elif self.grad_TH is not None:
            c.head.hidden_grad(grads_CV, c.weight_VH, self.grad_TH[place])
        if self.weight_VH is not None:
            c.head.weight_grad(grads_CV, c.hidden_TH[place], self.weight_VH, self.started)
            self.started = True

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        if self.sum_TH is not None:
            if self.chunks.group is not None and self.chunks.T:
                dist.all_reduce(self.sum_TH, group=self.chunks.group)
            self.grad_TH = self.sum_TH.to(self.chunks.hidden_TH.dtype)
        return self.grad_TH, self.weight_VH


def one_pass(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    loss: Cispo | Coefficients,
    plan: Plan,
    *,
    grads: tuple[bool, bool],
    weight_grad_VH: Tensor | None = None,
    loss_scale: float = 1.0,
) -> Pass:
    """Log-probs, loss terms and, where asked for, gradients in three products.

    Args:
        hidden_TH: bf16 or fp32, the same on all tensor-parallel ranks.
        weight_VH: this rank's rows of the head, of the same type.
        targets_T: token ids in the whole vocabulary; one outside it has log-prob -inf.
        loss: CISPO's inputs, or a function of a chunk's log-probs.
        plan: how to compute.
        grads: whether the gradients by hidden states and by the head are wanted.
        weight_grad_VH: fp32 tensor that the head's gradient is added to (Megatron's main grad).
        loss_scale: factor of the gradients (not of the loss terms).
    """
    chunks = _Chunks(hidden_TH, weight_VH, targets_T, plan)
    rows_5T = hidden_TH.new_zeros(5, chunks.T, dtype=torch.float32)
    sums = _Gradients(chunks, *grads, weight_grad_VH)
    ops = torch.ops.megatron_rl
    whole = isinstance(loss, Cispo) and chunks.group is None and any(grads) and loss_scale == 1.0
    inputs: list[Tensor] = []
    if isinstance(loss, Cispo):
        given = (loss.generator_logprobs_T, loss.advantages_T, loss.weights_T)
        inputs = [t.to(torch.float32).contiguous() for t in given]
        if any(t.shape != (chunks.T,) for t in inputs):
            raise ValueError(
                f"CISPO's inputs are {[list(t.shape) for t in inputs]}: [{chunks.T}] each is needed"
            )
    for place, logits_CV, grads_CV in chunks:
        if whole:
            assert isinstance(loss, Cispo)
            rows_5T[:, place] = ops.cispo_rows_(
                *(logits_CV, chunks.targets_T[place], chunks.first, chunks.columns, chunks.scale),
                *(t[place] for t in inputs),
                *(loss.max_ratio, chunks.bf16),
            )
            sums.add(place, grads_CV)
            continue
        logprobs_C, entropy_C, top_C, mass_C = chunks.statistics(place, logits_CV)
        rows_5T[0, place], rows_5T[1, place] = logprobs_C, entropy_C
        if isinstance(loss, Cispo):
            rows_5T[2:, place] = ops.cispo_terms(
                logprobs_C.contiguous(), *(t[place] for t in inputs), loss.max_ratio
            )
        else:
            rows_5T[4, place], rows_5T[3, place] = loss(logprobs_C, place)
        if any(grads):
            c_C = rows_5T[3, place] * loss_scale
            chunks.to_gradients(place, logits_CV, top_C, mass_C, c_C)
            sums.add(place, grads_CV)
    return Pass(rows_5T, *sums.finish())


def log_probs(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, plan: Plan) -> Tensor:
    """[4, T]: log-prob, entropy, largest logit, sum of e^d; the first of two passes."""
    chunks = _Chunks(hidden_TH, weight_VH, targets_T, plan)
    rows_4T = hidden_TH.new_zeros(4, chunks.T, dtype=torch.float32)
    for place, logits_CV, _ in chunks:
        rows_4T[:, place] = chunks.statistics(place, logits_CV)
    return rows_4T


def log_probs_backward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    rows_4T: Tensor,
    coefficients_T: Tensor,
    plan: Plan,
    *,
    grads: tuple[bool, bool],
    weight_grad_VH: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by hidden states and head, from those by the log-probs; the second pass."""
    chunks = _Chunks(hidden_TH, weight_VH, targets_T, plan)
    sums = _Gradients(chunks, *grads, weight_grad_VH)
    coefficients_T = coefficients_T.to(torch.float32)
    for place, logits_CV, grads_CV in chunks:
        chunks.to_gradients(
            place, logits_CV, rows_4T[2, place], rows_4T[3, place], coefficients_T[place]
        )
        sums.add(place, grads_CV)
    return sums.finish()
