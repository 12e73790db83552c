"""The three products of the LM head with fp32 results, for each kind of device and operand.

    logits       x = h w^T        hidden gradient  o = d w        weight gradient  g (+)= d^T h

Products of bf16 numbers are exact in fp32, so bf16 operands with fp32 sums give the results of fp32
copies, and no copy of the weight is kept that could go stale. Shape legend: C rows of a chunk,
H hidden, V vocabulary of this rank.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, get_args, override

import torch
from torch import Tensor

from megatron_rl.kernels import transformer_engine
from megatron_rl.kernels.library import CPU_KERNELS, cpu_kernel, load

log = logging.getLogger(__name__)

Precision = Literal["bf16", "tf32", "fp32"]
"""Precision of the head.

- `fp32`: fp32 logits; fp32 operands are multiplied in fp32, bf16 operands without a copy.
- `tf32`: as `fp32`, but fp32 operands (fp32 weights, fp32 logit gradients) may be rounded to TF32
  on GPU.
- `bf16`: logits rounded to bf16, as in an ordinary bf16 head; for comparisons.
"""
LogitGrads = Literal["auto", "bf16", "fp32"]
"""Type of the logit gradients in the two backward products; `auto`: the operands' type."""

UPCAST_ROWS = 8192
"""Most rows of a bf16 weight that are upcast at a time."""


class HeadProducts(ABC):
    """The products. Results are fp32 and are written into `out`; operands are used as stored."""

    name: str
    """Description for the log."""
    narrow_hidden_grad = False
    """`hidden_grad` also accepts `out` of the operands' type: fp32 sums, rounded once."""

    @abstractmethod
    def logits(self, hidden_CH: Tensor, weight_VH: Tensor, out_CV: Tensor) -> None:
        """Write hidden weight^T into `out`."""

    @abstractmethod
    def hidden_grad(self, grads_CV: Tensor, weight_VH: Tensor, out_CH: Tensor) -> None:
        """Write grads weight into `out`."""

    @abstractmethod
    def weight_grad(self, grads_CV: Tensor, hidden_CH: Tensor, out_VH: Tensor, add: bool) -> None:
        """Write grads^T hidden into `out`, or add it to it if `add`."""


class CpuBf16(HeadProducts):
    """GEMMs of `csrc/gemm_bf16.cpp`; `kind` is one of `library.CPU_KERNELS`, not `generic`."""

    def __init__(self, kind: str) -> None:
        self.kind = CPU_KERNELS.index(kind)
        self.name = f"bf16 x bf16 -> fp32 on CPU ({kind})"

    @override
    def logits(self, hidden_CH: Tensor, weight_VH: Tensor, out_CV: Tensor) -> None:
        torch.ops.megatron_rl.bf16_logits_(hidden_CH, weight_VH, out_CV, self.kind)

    @override
    def hidden_grad(self, grads_CV: Tensor, weight_VH: Tensor, out_CH: Tensor) -> None:
        torch.ops.megatron_rl.bf16_hidden_grad_(grads_CV, weight_VH, out_CH, self.kind)

    @override
    def weight_grad(self, grads_CV: Tensor, hidden_CH: Tensor, out_VH: Tensor, add: bool) -> None:
        torch.ops.megatron_rl.bf16_weight_grad_(grads_CV, hidden_CH, out_VH, add, self.kind)


class Upcast(HeadProducts):
    """fp32 products of fp32 operands or of exact upcasts, a block of the weight at a time."""

    def __init__(self, tf32: bool, device: str) -> None:
        self.tf32 = tf32 and device == "cuda"
        self.name = f"{'TF32' if self.tf32 else 'fp32'} products of exact upcasts"

    @contextmanager
    def _mode(self) -> Iterator[None]:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    @staticmethod
    def _blocks(weight_VH: Tensor) -> Iterator[tuple[slice, Tensor]]:
        if weight_VH.dtype == torch.float32:
            yield slice(None), weight_VH
            return
        step = _upcast_rows(len(weight_VH))
        scratch_BH = torch.empty_like(weight_VH[:step], dtype=torch.float32)
        for v in range(0, len(weight_VH), step):
            part_BH = weight_VH[v : v + step]
            yield slice(v, v + len(part_BH)), scratch_BH[: len(part_BH)].copy_(part_BH)

    @override
    def logits(self, hidden_CH: Tensor, weight_VH: Tensor, out_CV: Tensor) -> None:
        hidden_CH = hidden_CH.float()
        with self._mode():
            for block, w_BH in self._blocks(weight_VH):
                torch.mm(hidden_CH, w_BH.t(), out=out_CV[:, block])

    @override
    def hidden_grad(self, grads_CV: Tensor, weight_VH: Tensor, out_CH: Tensor) -> None:
        with self._mode():
            for block, w_BH in self._blocks(weight_VH):
                first = block.start in (None, 0)
                out_CH.addmm_(grads_CV[:, block].float(), w_BH, beta=0.0 if first else 1.0)

    @override
    def weight_grad(self, grads_CV: Tensor, hidden_CH: Tensor, out_VH: Tensor, add: bool) -> None:
        hidden_CH, beta, V = hidden_CH.float(), 1.0 if add else 0.0, len(out_VH)
        step = V if grads_CV.dtype == torch.float32 else _upcast_rows(V)
        with self._mode():
            for v in range(0, V, max(step, 1)):
                block = slice(v, v + step)
                out_VH[block].addmm_(grads_CV[:, block].float().t(), hidden_CH, beta=beta)


def _upcast_rows(V: int) -> int:
    # Small compared with the weight's gradient, and large enough for an efficient product.
    return min(max(V // 12, 512), UPCAST_ROWS)


@cache
def _addmm_takes_fp32() -> bool:
    """Return True if this torch adds a bf16 product to an fp32 matrix in place (new ones do)."""
    matrix = torch.zeros(16, 16, device="cuda")
    operand = matrix.bfloat16()
    try:
        torch.addmm(matrix, operand, operand, out_dtype=torch.float32, out=matrix)
    except (RuntimeError, TypeError) as error:
        log.warning("weight gradients are added in blocks: %s", error)
        return False
    return True


class CudaTorch(HeadProducts):
    """cuBLAS through torch: bf16 operands and fp32 results without upcasts."""

    name = "bf16 x bf16 -> fp32 by torch.mm(out_dtype=) (cuBLAS)"
    narrow_hidden_grad = True

    @override
    def logits(self, hidden_CH: Tensor, weight_VH: Tensor, out_CV: Tensor) -> None:
        torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32, out=out_CV)

    @override
    def hidden_grad(self, grads_CV: Tensor, weight_VH: Tensor, out_CH: Tensor) -> None:
        torch.mm(grads_CV, weight_VH, out_dtype=out_CH.dtype, out=out_CH)

    @override
    def weight_grad(self, grads_CV: Tensor, hidden_CH: Tensor, out_VH: Tensor, add: bool) -> None:
        grads_VC = grads_CV.t()
        if not add:
            torch.mm(grads_VC, hidden_CH, out_dtype=torch.float32, out=out_VH)
        elif _addmm_takes_fp32():
            torch.addmm(out_VH, grads_VC, hidden_CH, out_dtype=torch.float32, out=out_VH)
        else:
            for v in range(0, len(out_VH), UPCAST_ROWS):
                part_BC = grads_VC[v : v + UPCAST_ROWS]
                out_VH[v : v + UPCAST_ROWS] += torch.mm(part_BC, hidden_CH, out_dtype=torch.float32)


class TransformerEngine(CudaTorch):
    """Transformer Engine's `general_gemm(out_dtype=torch.float32)` for contiguous operands.

    It ignores strides, so strided operands (bf16 gradients in the memory of fp32 logits) go through
    torch.
    """

    name = "bf16 x bf16 -> fp32 by Transformer Engine's general_gemm (cuBLASLt)"

    def __init__(self, gemm: Callable[..., object]) -> None:
        self.gemm = gemm

    def _multiply(self, layout: str, a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> bool:
        # cuBLASLt needs rows of a multiple of 16 bytes.
        takes = all(t.is_contiguous() and t.shape[1] % 8 == 0 for t in (a, b, out))
        if takes:
            self.gemm(a, b, out_dtype=out.dtype, layout=layout, out=out, accumulate=add)
        return takes

    @override
    def logits(self, hidden_CH: Tensor, weight_VH: Tensor, out_CV: Tensor) -> None:
        if not self._multiply("TN", weight_VH, hidden_CH, out_CV):
            super().logits(hidden_CH, weight_VH, out_CV)

    @override
    def hidden_grad(self, grads_CV: Tensor, weight_VH: Tensor, out_CH: Tensor) -> None:
        if not self._multiply("NN", weight_VH, grads_CV, out_CH):
            super().hidden_grad(grads_CV, weight_VH, out_CH)

    @override
    def weight_grad(self, grads_CV: Tensor, hidden_CH: Tensor, out_VH: Tensor, add: bool) -> None:
        if not self._multiply("NT", hidden_CH, grads_CV, out_VH, add):
            super().weight_grad(grads_CV, hidden_CH, out_VH, add)


class Combined(HeadProducts):
    """Logits of one kind, rounded to bf16 on request, and gradients of another."""

    def __init__(self, forward: HeadProducts, backward: HeadProducts, rounded: bool) -> None:
        self.forward, self.backward, self.rounded = forward, backward, rounded
        self.narrow_hidden_grad = backward.narrow_hidden_grad
        backward_name = "" if backward is forward else f"; backward: {backward.name}"
        self.name = f"{forward.name}{' rounded to bf16' if rounded else ''}{backward_name}"

    @override
    def logits(self, hidden_CH: Tensor, weight_VH: Tensor, out_CV: Tensor) -> None:
        self.forward.logits(hidden_CH, weight_VH, out_CV)
        if self.rounded:
            for rows_V in out_CV.split(64):  # no second [C, V]
                rows_V.copy_(rows_V.bfloat16())

    @override
    def hidden_grad(self, grads_CV: Tensor, weight_VH: Tensor, out_CH: Tensor) -> None:
        self.backward.hidden_grad(grads_CV, weight_VH, out_CH)

    @override
    def weight_grad(self, grads_CV: Tensor, hidden_CH: Tensor, out_VH: Tensor, add: bool) -> None:
        self.backward.weight_grad(grads_CV, hidden_CH, out_VH, add)


def _bf16_products(device: str, tf32: bool) -> HeadProducts:
    if device == "cuda":
        gemm = transformer_engine.general_gemm()
        return CudaTorch() if gemm is None else TransformerEngine(gemm)
    kind = cpu_kernel(load())
    return Upcast(tf32, device) if kind == "generic" else CpuBf16(kind)


@cache
def select(
    precision: Precision, logit_grads: LogitGrads, operands: torch.dtype, device: str
) -> tuple[HeadProducts, torch.dtype]:
    """Return the products for a type of operands and device, and the type of logit gradients.

    The choice is logged once per combination.

    Raises:
        ValueError: an unknown setting, or operands that are neither bf16 nor fp32.
        RuntimeError: on GPU, a Transformer Engine that cannot be used.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}: one of {', '.join(get_args(Precision))}")
    if logit_grads not in get_args(LogitGrads):
        raise ValueError(f"logit_grads is {logit_grads!r}: one of {get_args(LogitGrads)}")
    if operands not in (torch.bfloat16, torch.float32):
        raise ValueError(f"hidden states and head are {operands}: bf16 or fp32 are supported")
    load()
    tf32, rounded = precision == "tf32", precision == "bf16"
    grads = {"auto": operands, "bf16": torch.bfloat16, "fp32": torch.float32}[logit_grads]
    upcast = Upcast(tf32, device)
    forward = _bf16_products(device, tf32) if operands == torch.bfloat16 else upcast
    backward = forward if grads == operands == torch.bfloat16 else upcast
    products = forward
    if rounded or backward is not forward:
        products = Combined(forward, backward, rounded)
    log.info(
        f"LM head: precision {precision}, {operands} operands, {grads} logit gradients on {device}:"
        f" {products.name}"
    )
    return products, grads
