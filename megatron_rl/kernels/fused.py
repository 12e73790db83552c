"""The two entry points for losses over the LM head, with autograd, for eager and compiled code.

    linear_loss       the loss itself, for CISPO and every loss that is a sum of functions of single
                      log-probs: gradients are made in the forward pass, three products
    linear_logprobs   log-probs with gradient, for losses of any shape: four products

The sum over tensor-parallel ranks of the hidden gradient is part of both: hidden states come from a
gather whose backward does not sum again (`gather_from_sequence_parallel_region(...,
tensor_parallel_output_grad=False)` under sequence parallelism, none without it).

A head with `main_grad` (Megatron's fp32 gradient buffer) gets its gradient added there, by the
convention of Megatron's fused weight gradients; else autograd delivers it in the head's own type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.kernels import linear, ops
from megatron_rl.kernels.heads import LogitGrads, Precision
from megatron_rl.kernels.linear import Cispo, Plan

TokenLoss = Callable[[Tensor, slice], Tensor]
"""(log-probs [C], their place in T) -> loss terms [C], each of its own log-prob alone."""


class Settings(TypedDict, total=False):
    """How the head computes; keyword arguments of both functions."""

    temperature: float
    """Divides the logits; 1 by default."""
    vocabulary: int | None
    """Real tokens; columns beyond it are padding. Default: all rows of the head."""
    group: dist.ProcessGroup | None
    """Tensor-parallel group; none by default."""
    precision: Precision
    """See `heads.Precision`; fp32 by default."""
    logit_grads: LogitGrads
    """See `heads.LogitGrads`; auto by default."""
    chunk_bytes: int | None
    """Memory for the logits of one chunk; default: `linear.CHUNK_BYTES`."""


def _plan(weight_VH: Tensor, given: Settings) -> Plan:
    values: dict[str, Any] = {
        "temperature": 1.0,
        "vocabulary": None,
        "group": None,
        "precision": "fp32",
        "logit_grads": "auto",
        "chunk_bytes": None,
        **given,
    }
    if values["vocabulary"] is None:
        size = values["group"].size() if values["group"] is not None else 1
        values["vocabulary"] = size * weight_VH.shape[0]
    return Plan(**values)


class LinearLoss(NamedTuple):
    """Result of `linear_loss`. Only `loss` has a gradient."""

    loss: Tensor
    """Sum of the loss terms, fp32 scalar."""
    logprobs_T: Tensor
    entropy_T: Tensor
    """Of each row's distribution, in nats."""
    ratio_T: Tensor
    """pi / pi_generator; 0 for losses other than CISPO."""
    coefficient_T: Tensor
    """Derivative of the loss by each log-prob."""


def coefficients_of(loss: TokenLoss) -> linear.Coefficients:
    """Loss terms and derivatives of a loss, by autograd over a chunk's log-probs."""

    def terms(logprobs_C: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf_C = logprobs_C.detach().requires_grad_()
            loss_C = loss(leaf_C, place)
            if loss_C.shape != leaf_C.shape:
                raise ValueError(
                    f"the loss gave {list(loss_C.shape)} for {list(leaf_C.shape)} log-probs:"
                    " one term per token is needed (sequence sums: linear_logprobs)"
                )
            (coefficient_C,) = torch.autograd.grad(loss_C.sum(), leaf_C)
        return loss_C.detach(), coefficient_C

    return terms


def _main_grad(weight_VH: Tensor) -> Tensor | None:
    main_grad = getattr(weight_VH, "main_grad", None)
    if main_grad is None or not weight_VH.requires_grad:
        return None
    if main_grad.dtype != torch.float32:
        raise ValueError(f"the head's main_grad is {main_grad.dtype}: fp32 is needed")
    grad: Tensor = main_grad.view(weight_VH.shape)
    return grad


def _mark_added(weight_VH: Tensor) -> Tensor:
    """The stand-in for a gradient that main_grad has already, as Megatron's layers return it."""
    weight: Any = weight_VH
    weight.grad_added_to_main_grad = True
    # A head shared with the embedding adds what autograd delivers on top: that must be 0.
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight_VH.shape, dtype=weight_VH.dtype, device=weight_VH.device)


class _Loss(torch.autograd.Function):
    """Gradients made in forward; the head's goes to main_grad there, or is held until backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        loss: Cispo | linear.Coefficients,
        plan: Plan,
        loss_scale: float | None,
        grads: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        direct = _main_grad(weight_VH) if loss_scale is not None and grads[1] else None
        done = linear.one_pass(
            *(hidden_TH, weight_VH, targets_T, loss, plan),
            grads=grads,
            weight_grad_VH=direct,
            loss_scale=1.0 if loss_scale is None else loss_scale,
        )
        ctx.direct, ctx.loss_scale, ctx.weight = direct is not None, loss_scale, weight_VH
        ctx.save_for_backward(done.hidden_grad_TH, None if ctx.direct else done.weight_grad_VH)
        ctx.mark_non_differentiable(done.rows_5T)
        return done.rows_5T[4].double().sum().float(), done.rows_5T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad_TH, weight_grad_VH = ctx.saved_tensors
        factor = grads[0]
        if ctx.loss_scale is not None:
            torch._assert_async(
                factor == ctx.loss_scale,
                f"the gradient of linear_loss is not loss_scale = {ctx.loss_scale}: the head's"
                " gradient was already added to main_grad with that factor",
            )
            factor = torch.ones_like(factor)  # the gradients have it
        elif hidden_grad_TH is not None:
            hidden_grad_TH = hidden_grad_TH * factor.to(hidden_grad_TH.dtype)
        if ctx.direct:
            weight_grad_VH = _mark_added(ctx.weight)
        elif weight_grad_VH is not None:
            main_grad = _main_grad(ctx.weight)
            if main_grad is None:
                weight_grad_VH = ops.scaled(weight_grad_VH, factor, ctx.weight.dtype)
            else:
                main_grad.addcmul_(weight_grad_VH, factor)
                weight_grad_VH = _mark_added(ctx.weight)
        return hidden_grad_TH, weight_grad_VH, None, None, None, None, None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        rows_4T = linear.log_probs(hidden_TH, weight_VH, targets_T, plan)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, rows_4T)
        ctx.plan = plan
        logprobs_T, entropy_T = rows_4T[0].clone(), rows_4T[1].clone()
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, rows_4T = ctx.saved_tensors
        main_grad = _main_grad(weight_VH)
        hidden_grad_TH, weight_grad_VH = linear.log_probs_backward(
            *(hidden_TH, weight_VH, targets_T, rows_4T, grads[0], ctx.plan),
            grads=(ctx.needs_input_grad[0], ctx.needs_input_grad[1]),
            weight_grad_VH=main_grad,
        )
        if weight_grad_VH is not None:
            if main_grad is not None:
                weight_grad_VH = _mark_added(weight_VH)
            else:
                weight_grad_VH = weight_grad_VH.to(weight_VH.dtype)
        return hidden_grad_TH, weight_grad_VH, None, None


def linear_loss(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    loss: Cispo | TokenLoss,
    *,
    loss_scale: float | None = None,
    **settings: Unpack[Settings],
) -> LinearLoss:
    """A summed policy loss of the tokens `targets_T`, with its gradients made in the same pass.

    Args:
        hidden_TH: hidden states of the rows that predict the targets, bf16 or fp32; the same on all
            ranks of `group`.
        weight_VH: this rank's rows of the head, of the same type.
        targets_T: token ids (int64) in the whole vocabulary.
        loss: CISPO's inputs, or a function of a chunk's log-probs that gives one term per token.
        loss_scale: the gradient that will reach `loss`, where it is known (1.0 if the trainer
            divides by nothing): then a head with main_grad gets its gradient during this call, and
            no [V, H] buffer is held until backward, which checks the promise. Without gradients
            (`torch.no_grad`) main_grad stays as it is.
        settings: see `Settings`.

    Raises:
        ValueError: shapes, types or settings that don't fit together.
    """
    plan = _plan(weight_VH, settings)
    # An operator can't add to main_grad and have an autograd formula; compiled code has no hooks.
    functional = torch.compiler.is_compiling() or _main_grad(weight_VH) is None
    if isinstance(loss, Cispo) and functional:
        total, rows_5T = ops.linear_cispo(hidden_TH, weight_VH, targets_T, loss, plan)
        return LinearLoss(total, *rows_5T.detach()[:4])
    function = loss if isinstance(loss, Cispo) else coefficients_of(loss)
    # Asked here: inside, gradients are off, and `needs_input_grad` knows nothing of no_grad.
    on = torch.is_grad_enabled()
    grads = (on and hidden_TH.requires_grad, on and weight_VH.requires_grad)
    total, rows_5T = _Loss.apply(hidden_TH, weight_VH, targets_T, function, plan, loss_scale, grads)
    return LinearLoss(total, *rows_5T[:4])


def linear_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, **settings: Unpack[Settings]
) -> tuple[Tensor, Tensor]:
    """Log-probs [T] with gradient and entropies [T] without; arguments as in `linear_loss`."""
    plan = _plan(weight_VH, settings)
    logprobs_T, entropy_T = _LogProbs.apply(hidden_TH, weight_VH, targets_T, plan)
    return logprobs_T, entropy_T
