"""Variants that compute CISPO's loss and gradients over an LM head, on the same inputs.

Each variant maps inputs to (loss, log-probs [T] or None, hidden gradient, weight gradient).
Shape legend: T tokens, H hidden, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_rl.kernels import heads, linear
from megatron_rl.kernels.fused import linear_loss
from megatron_rl.kernels.library import load

CAP = 5.0
SEQUENCES = 8
"""Liger's loss has one advantage per sequence, and one chunk per sequence."""


@dataclass
class Inputs:
    hidden_TH: Tensor
    weight_VH: Tensor
    targets_T: Tensor
    generator_logprobs_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor


Result = tuple[Tensor, Tensor | None, Tensor, Tensor]
Variant = Callable[[Inputs], Result | None]


def make_inputs(T: int, H: int, V: int, device: str, *, exact_ratio: bool) -> Inputs:
    """Make bf16 operands with logits to about +-16, and a tenth of the ratios beyond the cap.

    `exact_ratio` derives the generator's log-probs from the real ones; else they are one constant,
    which needs no product.
    """
    g = torch.Generator(device).manual_seed(0)
    hidden_TH = torch.randn(T, H, generator=g, device=device).bfloat16()
    weight_VH = torch.empty(V, H, dtype=torch.bfloat16, device=device)
    weight_VH.normal_(0, 3.0 / H**0.5, generator=g)
    targets_T = torch.randint(0, V, (T,), generator=g, device=device)
    advantages_S = torch.randn(SEQUENCES, generator=g, device=device)
    generator_T = torch.full((T,), -12.0, device=device)
    if exact_ratio:
        for i in range(0, T, 128):
            x = hidden_TH[i : i + 128].float() @ weight_VH.float().T
            logp = torch.log_softmax(x, -1).gather(1, targets_T[i : i + 128, None])[:, 0]
            generator_T[i : i + 128] = logp
        generator_T += torch.randn(T, generator=g, device=device) * 1.2
    return Inputs(
        hidden_TH,
        weight_VH,
        targets_T,
        generator_T,
        advantages_S.repeat_interleave(T // SEQUENCES),
        torch.full((T,), 1.0 / T, device=device),
    )


def _cispo(logits_TV: Tensor, d: Inputs) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(logits_TV, -1).gather(1, d.targets_T[:, None])[:, 0]
    ratio = torch.exp(logp.detach() - d.generator_logprobs_T).clamp(max=CAP)
    return -(d.weights_T * d.advantages_T * ratio * logp).sum(), logp


def _logits_fp32(h: Tensor, w: Tensor) -> Tensor:
    return h.float() @ w.float().t()


def _logits_bf16(h: Tensor, w: Tensor) -> Tensor:
    return (h @ w.t()).float()


def _autograd(head: Callable[[Tensor, Tensor], Tensor], compiled: bool) -> Variant:
    def forward(h: Tensor, w: Tensor, d: Inputs) -> tuple[Tensor, Tensor]:
        return _cispo(head(h, w), d)

    function: Any = torch.compile(forward, dynamic=False) if compiled else forward

    def run(d: Inputs) -> Result:
        h, w = d.hidden_TH.detach().requires_grad_(), d.weight_VH.detach().requires_grad_()
        loss, logp = function(h, w, d)
        loss.backward()
        assert h.grad is not None
        assert w.grad is not None
        return loss.detach(), logp.detach(), h.grad, w.grad

    return run


def _fused(main_grad: bool, grads: heads.LogitGrads = "auto") -> Variant:
    def run(d: Inputs) -> Result:
        h = d.hidden_TH.detach().requires_grad_()
        w: Any = d.weight_VH.detach().requires_grad_()
        if main_grad:
            w.main_grad = torch.zeros(w.shape, dtype=torch.float32, device=w.device)
        loss = linear.CispoInputs(d.generator_logprobs_T, d.advantages_T, d.weights_T, CAP)
        got = linear_loss(
            h,
            w,
            d.targets_T,
            loss,
            logit_grads=grads,
            loss_scale=1.0 if main_grad else None,
        )
        got.loss.backward()
        assert h.grad is not None
        return got.loss.detach(), got.logprobs_T, h.grad, w.main_grad if main_grad else w.grad

    return run


def _fused_generic() -> Variant:
    """Return the fused path of a processor without bf16 instructions."""
    run = _fused(True)

    def generic(d: Inputs) -> Result | None:
        heads.select.cache_clear()
        with patch.dict(os.environ, MEGATRON_RL_CPU_KERNEL="generic"):
            result = run(d)
        heads.select.cache_clear()
        return result

    return generic


def _liger(compiled: bool) -> Variant:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    module = LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=compiled,
        use_ref_model=False,
        chunk_size=1,
        epsilon_high=CAP,
        loss_type="cispo",
    )

    def run(d: Inputs) -> Result:
        T, H = d.hidden_TH.shape
        n = T // SEQUENCES
        h = d.hidden_TH.detach().view(SEQUENCES, n, H).requires_grad_()
        w = d.weight_VH.detach().requires_grad_()
        loss, _ = module(
            h,
            w,
            d.targets_T.view(SEQUENCES, n),
            torch.ones(SEQUENCES, n, device=h.device),
            d.advantages_T.view(SEQUENCES, n)[:, 0].contiguous(),
            old_per_token_logps=d.generator_logprobs_T.view(SEQUENCES, n),
        )
        loss.backward()
        assert h.grad is not None
        assert w.grad is not None
        return loss.detach(), None, h.grad.view(T, H), w.grad

    return run


def _of_logprobs(logprobs: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Variant:
    """Return CISPO by autograd over `logprobs(hidden, weight, targets)`."""

    def run(d: Inputs) -> Result:
        h, w = d.hidden_TH.detach().requires_grad_(), d.weight_VH.detach().requires_grad_()
        logp = logprobs(h, w, d.targets_T)
        ratio = torch.exp(logp.detach() - d.generator_logprobs_T).clamp(max=CAP)
        loss = -(d.weights_T * d.advantages_T * ratio * logp).sum()
        loss.backward()
        assert h.grad is not None
        assert w.grad is not None
        return loss.detach(), logp.detach(), h.grad, w.grad

    return run


def _liger_of_the_card() -> Variant:
    """Return Liger's own kernels: CuTe DSL on Hopper, `liger-cute-kernels` on Blackwell.

    Raises:
        RuntimeError: another card, or a package that is missing: Liger would take plain torch.
    """
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as liger

    major, minor = torch.cuda.get_device_capability()
    if (major, minor) == (9, 0):
        apply = liger._load_sm90_function().apply  # ImportError without liger-kernel[cutedsl]
        return _of_logprobs(lambda h, w, y: -apply(h, w, y))
    if major != 10:
        raise RuntimeError(f"it has none for compute capability {major}.{minor}")
    if liger._load_native_tp_function() is None:
        raise RuntimeError("Blackwell's kernels are in liger-kernel[lck], which is not installed")
    from liger_kernel.ops import configure

    world, configured = _world_of_one(), set[tuple[int, int, int]]()

    def logprobs(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        size = (*h.shape, w.shape[0])
        if size not in configured:
            capacity = configure.FusedLinearCrossEntropyConfig(*size, group="world")
            if not configure.configure(process_groups={"world": world}, flsce=capacity):
                raise RuntimeError("liger-cute-kernels does not take this card")
            configured.add(size)
        return -liger.LigerFusedLinearScaledCrossEntropyTPFunction.apply(h, w, y, world)

    return _of_logprobs(logprobs)


def _cut_cross_entropy() -> Variant:
    from cut_cross_entropy import linear_cross_entropy

    return _of_logprobs(lambda h, w, y: -linear_cross_entropy(h, w, y, reduction="none"))


def _world_of_one() -> Any:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def _megatron() -> Variant:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    world = _world_of_one()

    def logprobs(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        logits = (h @ w.t())[:, None, :]
        return -fused_vocab_parallel_cross_entropy(logits, y[:, None], world)[:, 0]

    return _of_logprobs(logprobs)


def _floor(fp32: bool) -> Variant:
    """Return the three products alone, by the calls and in the chunks of the fused path."""

    def run(d: Inputs) -> None:
        load()
        T, H = d.hidden_TH.shape
        V, device = d.weight_VH.shape[0], d.hidden_TH.device
        head, dtype = heads.select("fp32", "fp32" if fp32 else "auto", torch.bfloat16, device.type)
        stride = linear.row_stride(V, device.type)
        C = min(linear.chunk_rows(stride, device.type, None), T)
        buffer = torch.zeros(C, stride, device=device)
        grads = buffer.view(dtype)[:, :V]
        weight_grad = torch.zeros(V, H, device=device)
        narrow = torch.bfloat16 if head.narrow_hidden_grad else torch.float32
        hidden_grad = torch.empty(C, H, device=device, dtype=narrow)
        for i in range(0, T, C):
            h = d.hidden_TH[i : i + C]
            n = len(h)
            head.logits(h, d.weight_VH, buffer[:n, :V])
            if dtype == torch.bfloat16 and i == 0:
                # Ordinary numbers, as of gradients; the bits of fp32 logits are not.
                grads.fill_(1e-3)
            head.hidden_grad(grads[:n], d.weight_VH, hidden_grad[:n])
            head.weight_grad(grads[:n], h, weight_grad, True)

    return run


FACTORIES: dict[str, Callable[[], Variant]] = {
    "eager, fp32 logits": lambda: _autograd(_logits_fp32, False),
    "eager, bf16 logits": lambda: _autograd(_logits_bf16, False),
    "torch.compile, fp32 logits": lambda: _autograd(_logits_fp32, True),
    "torch.compile, bf16 logits": lambda: _autograd(_logits_bf16, True),
    "Liger cispo": lambda: _liger(False),
    "Liger cispo, compiled": lambda: _liger(True),
    "Liger, kernels of the card": _liger_of_the_card,
    "cut-cross-entropy": _cut_cross_entropy,
    "Megatron fused cross-entropy, bf16 logits": _megatron,
    "fused": lambda: _fused(True),
    "fused, through autograd": lambda: _fused(False),
    "fused, fp32 logit gradients": lambda: _fused(True, "fp32"),
    "fused, without bf16 instructions": _fused_generic,
    "three products alone": lambda: _floor(False),
    "three products alone, fp32 gradients": lambda: _floor(True),
}
CPU_ONLY = ("fused, without bf16 instructions",)
CUDA_ONLY = (
    *("Liger, kernels of the card", "cut-cross-entropy"),
    "Megatron fused cross-entropy, bf16 logits",
)
