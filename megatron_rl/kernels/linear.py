"""The head and a policy loss in chunks over tokens: [T, V] never exists.

In one pass (`one_pass`) a chunk's logits go through the row kernel (log-prob, entropy, coefficient,
gradient in place) into hidden and weight gradient. In the second of two passes the coefficients
arrive with the backward pass. Under tensor parallelism each rank holds V columns of the vocabulary;
the ranks exchange 16 bytes per token, and the hidden gradient is summed over them once, in fp32.

Shape legend: T tokens, C tokens of a chunk, H hidden, V vocabulary of this rank, R tensor-parallel
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.kernels import heads

CHUNK_BYTES = {"cpu": 136 * 2**20, "cuda": 3175 * 2**20}
"""Default memory budget of a chunk's logits per device type."""
CPU_ROWS, CPU_LOGITS = 256, 2**18
"""Default limit of a chunk on CPU, in tokens or, if that is more, in logits."""

Coefficients = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(log-probs [C], chunk of T) -> (loss terms [C], derivative of the loss by log-prob [C])."""


@dataclass(frozen=True, slots=True)
class CispoInputs:
    """Inputs of CISPO, fp32 [T] each: L = sum -w min(ratio, cap) A log p, the ratio detached."""

    generator_logprobs_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    max_ratio: float

    def checked(self, T: int) -> CispoInputs:
        """Return contiguous fp32 inputs; raise ValueError for other shapes than [T]."""
        inputs = [self.generator_logprobs_T, self.advantages_T, self.weights_T]
        shapes = [list(t.shape) for t in inputs]
        if shapes != [[T]] * 3:
            raise ValueError(f"CISPO's inputs are {shapes}: [{T}] each is needed")
        logprobs_T, advantages_T, weights_T = (t.to(torch.float32).contiguous() for t in inputs)
        return CispoInputs(logprobs_T, advantages_T, weights_T, self.max_ratio)

    def of(self, chunk: slice) -> tuple[Tensor, Tensor, Tensor, float]:
        """Return the arguments of the row operators for a chunk."""
        logprobs_C, advantages_C = self.generator_logprobs_T[chunk], self.advantages_T[chunk]
        return logprobs_C, advantages_C, self.weights_T[chunk], self.max_ratio


class HeadSettings(TypedDict, total=False):
    """Keyword arguments of every function here and in `fused`."""

    temperature: float  # divides the logits; 1 by default
    vocabulary: int | None
    """Real tokens of the whole vocabulary; later rows of the head are padding. None: no padding."""
    group: dist.ProcessGroup | None
    """Tensor-parallel group; its ranks hold the vocabulary's shards in order. Default: none."""
    precision: heads.Precision
    logit_grads: heads.LogitGrads
    chunk_bytes: int | None  # memory budget of a chunk's logits; default: `CHUNK_BYTES`


def row_stride(V: int, device: str) -> int:
    """Return the distance between rows of a chunk's logits, in elements."""
    # CPU: rows a multiple of the page size apart would share cache sets. cuBLASLt: rows without
    # gaps, aligned to 16 bytes.
    return (V + 63) // 64 * 64 + 64 if device == "cpu" else (V + 7) // 8 * 8


def chunk_rows(stride: int, device: str, budget: int | None, upcasts: bool = False) -> int:
    """Return the tokens of a chunk that fit the budget in bytes, a multiple of 32 if possible."""
    rows = (CHUNK_BYTES[device] if budget is None else budget) // (4 * stride)
    if budget is None and device == "cpu":
        # Upcasts of bf16 operands need memory of their own.
        rows = min(rows, max(CPU_ROWS // 2 if upcasts else CPU_ROWS, CPU_LOGITS // stride))
    return max(1, rows // 32 * 32 or rows)


class _Chunks:
    """Loop over chunks: checks, shard bounds, chunk size and the logits buffer."""

    def __init__(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        *,
        temperature: float = 1.0,
        vocabulary: int | None = None,
        group: dist.ProcessGroup | None = None,
        precision: heads.Precision = "fp32",
        logit_grads: heads.LogitGrads = "auto",
        chunk_bytes: int | None = None,
    ) -> None:
        (T, H), V = hidden_TH.shape, len(weight_VH)
        if weight_VH.shape[1] != H or hidden_TH.dtype != weight_VH.dtype:
            raise ValueError(
                f"hidden states are {hidden_TH.dtype} {list(hidden_TH.shape)}, the head is"
                f" {weight_VH.dtype} {list(weight_VH.shape)}: type and width must agree"
            )
        if targets_T.shape != (T,) or targets_T.dtype != torch.int64:
            raise ValueError(
                f"targets are {targets_T.dtype} {list(targets_T.shape)}: int64 [{T}] is needed"
            )
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}: it must be positive")
        self.group = group if group is not None and group.size() > 1 else None
        rank, size = (self.group.rank(), self.group.size()) if self.group else (0, 1)
        vocabulary = V * size if vocabulary is None else vocabulary
        if not 0 < vocabulary <= V * size:
            raise ValueError(
                f"vocabulary is {vocabulary}: the head has {V} rows on each of {size} ranks"
            )
        self.first, self.scale = rank * V, 1.0 / temperature
        self.columns = min(max(vocabulary - self.first, 0), V)
        device, dtype = hidden_TH.device.type, hidden_TH.dtype
        self.products, grad_dtype = heads.select(precision, logit_grads, dtype, device)
        self.bf16 = grad_dtype == torch.bfloat16
        stride = row_stride(V, device)
        upcasts = self.products.upcasts and dtype == torch.bfloat16
        self.rows = max(1, min(chunk_rows(stride, device, chunk_bytes, upcasts), T))
        self.T, self.V = T, V
        self.logits_CV = hidden_TH.new_empty(self.rows, stride, dtype=torch.float32)
        self.hidden_TH = hidden_TH if hidden_TH.stride(1) == 1 else hidden_TH.contiguous()
        self.weight_VH = weight_VH if weight_VH.stride(1) == 1 else weight_VH.contiguous()
        self.targets_T = targets_T.contiguous()

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (chunk of T, logits [C, V], the view that their gradient will take [C, V])."""
        for begin in range(0, self.T, self.rows):
            chunk = slice(begin, min(begin + self.rows, self.T))
            rows = self.logits_CV[: chunk.stop - begin]
            logits_CV = rows[:, : self.V]
            self.products.logits(self.hidden_TH[chunk], self.weight_VH, logits_CV)
            grads_CV = rows.view(torch.bfloat16)[:, : self.V] if self.bf16 else logits_CV
            yield chunk, logits_CV, grads_CV

    def shard(self, chunk: slice) -> tuple[Tensor, int, int, float]:
        """Return the arguments of the row operators that follow the logits."""
        return self.targets_T[chunk], self.first, self.columns, self.scale

    def statistics(self, chunk: slice, logits_CV: Tensor) -> Tensor:
        """Return [4, C] over the whole vocabulary: log-prob, entropy, largest logit, sum of e^d."""
        ops = torch.ops.megatron_rl
        stats_4C = ops.row_stats(logits_CV, *self.shard(chunk))
        gathered = stats_4C
        if self.group is not None:
            gathered = stats_4C.new_empty(self.group.size() * 4, stats_4C.shape[1])
            dist.all_gather_into_tensor(gathered, stats_4C, group=self.group)
        merged_4C: Tensor = ops.merge_rows(gathered.view(-1, *stats_4C.shape), self.scale)
        return merged_4C


class _Gradients:
    """The sums of both gradients over chunks; a gradient that is not requested is None."""

    def __init__(
        self, chunks: _Chunks, hidden: bool, weight: bool, weight_grad_VH: Tensor | None
    ) -> None:
        self.chunks, h, fp32 = chunks, chunks.hidden_TH, torch.float32
        # A sum over ranks is fp32 and is rounded once.
        dtype = h.dtype if chunks.group is None else fp32
        self.hidden_TH = h.new_empty(h.shape, dtype=dtype) if hidden else None
        self.part_CH: Tensor | None = None
        if hidden and dtype != fp32 and not chunks.products.narrow_hidden_grad:
            self.part_CH = h.new_empty(chunks.rows, h.shape[1], dtype=fp32)
        self.weight_VH = weight_grad_VH if weight else None
        self.started = weight_grad_VH is not None
        if weight and self.weight_VH is None:
            # The first chunk writes all of it; without chunks it is 0.
            make = h.new_empty if chunks.T else h.new_zeros
            self.weight_VH = make(chunks.weight_VH.shape, dtype=fp32)

    def add(self, chunk: slice, grads_CV: Tensor) -> None:
        c = self.chunks
        if self.hidden_TH is not None:
            out_CH = self.hidden_TH[chunk]
            fp32_CH = out_CH if self.part_CH is None else self.part_CH[: len(out_CH)]
            c.products.hidden_grad(grads_CV, c.weight_VH, fp32_CH)
            if self.part_CH is not None:
                out_CH.copy_(fp32_CH)
        if self.weight_VH is not None:
            c.products.weight_grad(grads_CV, c.hidden_TH[chunk], self.weight_VH, self.started)
            self.started = True

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """Return (hidden gradient, weight gradient) after the sum over tensor-parallel ranks."""
        if self.hidden_TH is not None:
            if self.chunks.group is not None and self.chunks.T:
                dist.all_reduce(self.hidden_TH, group=self.chunks.group)
            self.hidden_TH = self.hidden_TH.to(self.chunks.hidden_TH.dtype)
        return self.hidden_TH, self.weight_VH


def one_pass(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    loss: CispoInputs | Coefficients | None,
    *,
    grads: tuple[bool, bool],
    weight_grad_VH: Tensor | None = None,
    loss_scale: float = 1.0,
    **settings: Unpack[HeadSettings],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute log-probs, loss terms and the requested gradients in three products.

    Args:
        hidden_TH: bf16 or fp32, the same on all tensor-parallel ranks.
        weight_VH: this rank's rows of the head, of the same type.
        targets_T: token ids in the whole vocabulary; an id outside it has log-prob -inf.
        loss: CISPO's inputs, a function of a chunk's log-probs, or None for log-probs alone.
        grads: request the gradients by hidden states and by the head; else they are None.
        weight_grad_VH: fp32 tensor that the head's gradient is added to (Megatron's main grad).
        loss_scale: factor of the gradients (not of the loss terms).
        settings: see `HeadSettings`.

    Returns rows [5, T] (log-prob, entropy, ratio or 0 for other losses, coefficient, loss term);
    the hidden gradient [T, H] of the operands' type, summed over the tensor-parallel ranks; the
    fp32 weight gradient [V, H] of this shard.
    """
    chunks = _Chunks(hidden_TH, weight_VH, targets_T, **settings)
    sums, ops = _Gradients(chunks, *grads, weight_grad_VH), torch.ops.megatron_rl
    rows_5T = hidden_TH.new_zeros(5, chunks.T, dtype=torch.float32)
    loss = loss.checked(chunks.T) if isinstance(loss, CispoInputs) else loss
    one_kernel = chunks.group is None and any(grads) and loss_scale == 1.0
    for chunk, logits_CV, grads_CV in chunks:
        if isinstance(loss, CispoInputs) and one_kernel:
            arguments = (*chunks.shard(chunk), *loss.of(chunk), chunks.bf16)
            rows_5T[:, chunk] = ops.cispo_rows_(logits_CV, *arguments)
            sums.add(chunk, grads_CV)
            continue
        logprobs_C, entropy_C, top_C, mass_C = chunks.statistics(chunk, logits_CV)
        rows_5T[0, chunk], rows_5T[1, chunk] = logprobs_C, entropy_C
        if isinstance(loss, CispoInputs):
            rows_5T[2:, chunk] = ops.cispo_terms(logprobs_C.contiguous(), *loss.of(chunk))
        elif loss is not None:
            rows_5T[4, chunk], rows_5T[3, chunk] = loss(logprobs_C, chunk)
        if any(grads):
            columns = (x.contiguous() for x in (top_C, mass_C, rows_5T[3, chunk] * loss_scale))
            ops.row_grads_(logits_CV, *chunks.shard(chunk), *columns, chunks.bf16)
            sums.add(chunk, grads_CV)
    return rows_5T, *sums.finish()
