"""The three products of the LM head with fp32 results, for each kind of device and operand.

    logits       x = h w^T        hidden gradient  o = d w        weight gradient  g (+)= d^T h

Products of bf16 numbers are exact in fp32, so bf16 operands with fp32 sums give the results of fp32
copies, and no copy of the weight is kept that could go stale. Shape legend: C rows of a chunk,
H hidden, V vocabulary of this rank.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl.kernels import transformer_engine
from megatron_rl.kernels.library import CPU_KERNELS, GEMMS, cpu_kernel, load

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


Product = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class HeadProducts:
    """The products. Results are fp32 and are written into `out`; operands are used as stored."""

    name: str
    logits: Product  # (hidden [C, H], weight [V, H], out [C, V]): hidden weight^T
    hidden_grad: Product  # (grads [C, V], weight [V, H], out [C, H]): grads weight
    weight_grad: Callable[[Tensor, Tensor, Tensor, bool], None]
    """(grads [C, V], hidden [C, H], out [V, H], add): grads^T hidden, written or added."""
    upcasts: bool = False  # bf16 operands are copied to fp32, which takes memory
    narrow_hidden_grad: bool = False
    """`hidden_grad` also accepts `out` of the operands' type: fp32 sums, rounded once."""


def _upcast(tf32: bool) -> HeadProducts:
    """Return fp32 products of fp32 operands or exact upcasts, a block of the weight at a time."""

    @contextmanager
    def mode() -> Iterator[None]:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    def logits(hidden_CH: Tensor, weight_VH: Tensor, out_CV: Tensor) -> None:
        hidden_CH = hidden_CH.float()
        with mode():
            for block, w_BH in _blocks(weight_VH):
                torch.mm(hidden_CH, w_BH.t(), out=out_CV[:, block])

    def hidden_grad(grads_CV: Tensor, weight_VH: Tensor, out_CH: Tensor) -> None:
        with mode():
            for block, w_BH in _blocks(weight_VH):
                first = block.start in (None, 0)
                out_CH.addmm_(grads_CV[:, block].float(), w_BH, beta=0.0 if first else 1.0)

    def weight_grad(grads_CV: Tensor, hidden_CH: Tensor, out_VH: Tensor, add: bool) -> None:
        hidden_CH, beta, V = hidden_CH.float(), 1.0 if add else 0.0, len(out_VH)
        step = V if grads_CV.dtype == torch.float32 else _upcast_rows(V)
        with mode():
            for v in range(0, V, max(step, 1)):
                block = slice(v, v + step)
                out_VH[block].addmm_(grads_CV[:, block].float().t(), hidden_CH, beta=beta)

    name = f"{'TF32' if tf32 else 'fp32'} products of exact upcasts"
    return HeadProducts(name, logits, hidden_grad, weight_grad, upcasts=True)


def _blocks(weight_VH: Tensor) -> Iterator[tuple[slice, Tensor]]:
    if weight_VH.dtype == torch.float32:
        yield slice(None), weight_VH
        return
    step = _upcast_rows(len(weight_VH))
    scratch_BH = torch.empty_like(weight_VH[:step], dtype=torch.float32)
    for v in range(0, len(weight_VH), step):
        part_BH = weight_VH[v : v + step]
        yield slice(v, v + len(part_BH)), scratch_BH[: len(part_BH)].copy_(part_BH)


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


def _cuda_weight_grad(grads_CV: Tensor, hidden_CH: Tensor, out_VH: Tensor, add: bool) -> None:
    grads_VC = grads_CV.t()
    if not add:
        torch.mm(grads_VC, hidden_CH, out_dtype=torch.float32, out=out_VH)
    elif _addmm_takes_fp32():
        torch.addmm(out_VH, grads_VC, hidden_CH, out_dtype=torch.float32, out=out_VH)
    else:
        for v in range(0, len(out_VH), UPCAST_ROWS):
            part_BC = grads_VC[v : v + UPCAST_ROWS]
            out_VH[v : v + UPCAST_ROWS] += torch.mm(part_BC, hidden_CH, out_dtype=torch.float32)


CUDA_TORCH = HeadProducts(
    "bf16 x bf16 -> fp32 by torch.mm(out_dtype=) (cuBLAS)",
    lambda h, w, out: torch.mm(h, w.t(), out_dtype=torch.float32, out=out),
    lambda grads, w, out: torch.mm(grads, w, out_dtype=out.dtype, out=out),
    _cuda_weight_grad,
    narrow_hidden_grad=True,
)


def with_transformer_engine(gemm: Callable[..., object]) -> HeadProducts:
    """Return Transformer Engine's `general_gemm(out_dtype=torch.float32)` for contiguous operands.

    It ignores strides, so strided operands (bf16 gradients in the memory of fp32 logits) go through
    torch.
    """

    def product(layout: str, by_torch: Callable[..., None]) -> Callable[..., None]:
        def multiply(a: Tensor, b: Tensor, out: Tensor, *add: bool) -> None:
            # cuBLASLt needs rows of a multiple of 16 bytes.
            if all(t.is_contiguous() and t.shape[1] % 8 == 0 for t in (a, b, out)):
                gemm(b, a, out_dtype=out.dtype, layout=layout, out=out, accumulate=any(add))
            else:
                by_torch(a, b, out, *add)

        return multiply

    return replace(
        CUDA_TORCH,
        name="bf16 x bf16 -> fp32 by Transformer Engine's general_gemm (cuBLASLt)",
        logits=product("TN", CUDA_TORCH.logits),
        hidden_grad=product("NN", CUDA_TORCH.hidden_grad),
        weight_grad=product("NT", CUDA_TORCH.weight_grad),
    )


def _rounded(products: HeadProducts) -> HeadProducts:
    """Return the products with logits that are rounded to bf16."""

    def logits(hidden_CH: Tensor, weight_VH: Tensor, out_CV: Tensor) -> None:
        products.logits(hidden_CH, weight_VH, out_CV)
        for rows_V in out_CV.split(64):  # no second [C, V]
            rows_V.copy_(rows_V.bfloat16())

    return replace(products, name=f"{products.name} rounded to bf16", logits=logits)


def _bf16_products(device: str, tf32: bool) -> HeadProducts:
    if device == "cuda":
        gemm = transformer_engine.general_gemm()
        return CUDA_TORCH if gemm is None else with_transformer_engine(gemm)
    if (kind := cpu_kernel(load())) == "generic":
        return _upcast(tf32)
    number, ops = CPU_KERNELS.index(kind), torch.ops.megatron_rl  # csrc/gemm_bf16.cpp
    logits, hidden, weight = (partial(getattr(ops, name), kind=number) for name in GEMMS)
    return HeadProducts(f"bf16 x bf16 -> fp32 on CPU ({kind})", logits, hidden, weight)


@cache
def select(
    precision: Precision, logit_grads: LogitGrads, operands: torch.dtype, device: str
) -> tuple[HeadProducts, torch.dtype]:
    """Return the products for a type of operands and device, and the type of logit gradients.

    The choice is logged once per combination. ValueError: an unknown setting, or operands that are
    neither bf16 nor fp32. RuntimeError: on GPU, a Transformer Engine that cannot be used.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}: one of {', '.join(get_args(Precision))}")
    if logit_grads not in get_args(LogitGrads):
        raise ValueError(f"logit_grads is {logit_grads!r}: one of {get_args(LogitGrads)}")
    if operands not in (torch.bfloat16, torch.float32):
        raise ValueError(f"hidden states and head are {operands}: bf16 or fp32 are supported")
    load()
    tf32 = precision == "tf32" and device == "cuda"
    grads = {"auto": operands, "bf16": torch.bfloat16, "fp32": torch.float32}[logit_grads]
    forward = _bf16_products(device, tf32) if operands == torch.bfloat16 else _upcast(tf32)
    products = _rounded(forward) if precision == "bf16" else forward
    if grads != operands and not forward.upcasts:
        backward = _upcast(tf32)
        name = f"{products.name}; backward: {backward.name}"
        products = replace(backward, name=name, logits=products.logits, upcasts=False)
    log.info(
        f"LM head: precision {precision}, {operands} operands, {grads} logit gradients on {device}:"
        f" {products.name}"
    )
    return products, grads
