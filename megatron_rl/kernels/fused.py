"""The two entry points for losses over the LM head, with autograd, for eager and compiled code.

Both sum the hidden gradient over the tensor-parallel ranks: gather hidden states by
`gather_from_sequence_parallel_region(..., tensor_parallel_output_grad=False)`. The gradient of a
head with `main_grad` (Megatron's fp32 buffer) is added there, as Megatron's fused weight gradients
are; else autograd delivers it in the head's own type.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from megatron_rl.kernels import linear, ops
from megatron_rl.kernels.linear import CispoInputs, HeadSettings

TokenLoss = Callable[[Tensor, slice], Tensor]
"""(log-probs [C], chunk of T) -> loss terms [C], each a function of its own log-prob only."""


class LinearLoss(NamedTuple):
    """Result of `linear_loss`. Only `loss` has a gradient."""

    loss: Tensor  # sum of the loss terms, fp32 scalar
    logprobs_T: Tensor
    entropy_T: Tensor  # entropy of each row's distribution [nats]
    ratio_T: Tensor  # pi / pi_generator; 0 for losses other than CISPO
    coefficient_T: Tensor  # derivative of the loss by each log-prob


def coefficients_of(loss: TokenLoss) -> linear.Coefficients:
    """Return the loss terms and derivatives of a loss as a function, by autograd over a chunk."""

    def terms(logprobs_C: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf_C = logprobs_C.detach().requires_grad_()
            loss_C = loss(leaf_C, chunk)
            if loss_C.shape != leaf_C.shape:
                raise ValueError(
                    f"the loss returned {list(loss_C.shape)} for {list(leaf_C.shape)} log-probs:"
                    " one term per token is needed (for sequence sums use linear_logprobs)"
                )
            (coefficient_C,) = torch.autograd.grad(loss_C.sum(), leaf_C)
        return loss_C.detach(), coefficient_C

    return terms


def _main_grad(weight_VH: Tensor) -> Tensor | None:
    main_grad = getattr(weight_VH, "main_grad", None)
    if main_grad is None or not weight_VH.requires_grad:
        return None
    if main_grad.dtype != torch.float32:
        raise ValueError(f"main_grad of the head is {main_grad.dtype}: fp32 is needed")
    grad: Tensor = main_grad.view(weight_VH.shape)
    return grad


def _mark_added(weight_VH: Tensor) -> Tensor:
    """Return a placeholder for a gradient already in main_grad, as Megatron's layers do."""
    weight: Any = weight_VH
    weight.grad_added_to_main_grad = True
    # A head shared with the embedding adds autograd's gradient to main_grad: it must be 0.
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight_VH.shape, dtype=weight_VH.dtype, device=weight_VH.device)


class _Loss(torch.autograd.Function):
    """Gradients in forward; the head's is added to main_grad there, or kept until backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        loss: CispoInputs | linear.Coefficients,
        settings: HeadSettings,
        loss_scale: float | None,
        grads: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        direct = _main_grad(weight_VH) if loss_scale is not None and grads[1] else None
        scale = 1.0 if loss_scale is None else loss_scale
        operands = (hidden_TH, weight_VH, targets_T)
        rows_5T, hidden_grad_TH, weight_grad_VH = linear.one_pass(
            *operands, loss, grads=grads, weight_grad_VH=direct, loss_scale=scale, **settings
        )
        ctx.direct, ctx.loss_scale, ctx.weight = direct is not None, loss_scale, weight_VH
        ctx.save_for_backward(hidden_grad_TH, None if ctx.direct else weight_grad_VH)
        ctx.mark_non_differentiable(rows_5T)
        return rows_5T[4].double().sum().float(), rows_5T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_grad_TH, weight_grad_VH), factor = ctx.saved_tensors, grads[0]
        if ctx.loss_scale is not None:
            torch._assert_async(
                factor == ctx.loss_scale,
                f"the gradient of linear_loss is not loss_scale = {ctx.loss_scale}: the head's"
                " gradient was already added to main_grad with that factor",
            )
            factor = torch.ones_like(factor)  # the gradients include it
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
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, settings: HeadSettings
    ) -> tuple[Tensor, Tensor]:
        operands = (hidden_TH, weight_VH, targets_T)
        rows_5T, *_ = linear.one_pass(*operands, None, grads=(False, False), **settings)
        ctx.save_for_backward(*operands)
        ctx.settings = settings
        logprobs_T, entropy_T = rows_5T[0].clone(), rows_5T[1].clone()
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_TH, weight_VH, targets_T), coefficients_T = ctx.saved_tensors, grads[0].float()
        main_grad, needed = _main_grad(weight_VH), ctx.needs_input_grad[:2]
        inputs = (hidden_TH, weight_VH, targets_T, lambda x_C, c: (x_C, coefficients_T[c]))
        _, hidden_grad_TH, weight_grad_VH = linear.one_pass(
            *inputs, grads=needed, weight_grad_VH=main_grad, **ctx.settings
        )
        if weight_grad_VH is not None and main_grad is not None:
            weight_grad_VH = _mark_added(weight_VH)
        elif weight_grad_VH is not None:
            weight_grad_VH = weight_grad_VH.to(weight_VH.dtype)
        return hidden_grad_TH, weight_grad_VH, None, None


def linear_loss(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    loss: CispoInputs | TokenLoss,
    *,
    loss_scale: float | None = None,
    **settings: Unpack[HeadSettings],
) -> LinearLoss:
    """Return a policy loss summed over the tokens `targets_T`, with gradients from the same pass.

    Args:
        hidden_TH: hidden states of the rows that predict the targets, bf16 or fp32; the same on all
            ranks of `group`.
        weight_VH: this rank's rows of the head, of the same type.
        targets_T: token ids (int64) in the whole vocabulary.
        loss: CISPO's inputs, or a function of a chunk's log-probs that returns one term per token.
        loss_scale: the gradient that will reach `loss`, if it is known in advance (1.0 if the
            trainer divides by nothing). The gradient of a head with main_grad is then added during
            this call, no [V, H] buffer is kept until backward, and backward checks the value. Under
            `torch.no_grad` main_grad does not change.
        settings: see `HeadSettings`.

    Raises:
        ValueError: shapes, types or settings that don't fit together.
    """
    # An operator with an autograd formula can't add to main_grad; compiled code has no hooks.
    functional = torch.compiler.is_compiling() or _main_grad(weight_VH) is None
    # Read here: in `forward` gradients are off, and `needs_input_grad` ignores no_grad.
    on = torch.is_grad_enabled()
    grads = (on and hidden_TH.requires_grad, on and weight_VH.requires_grad)
    if isinstance(loss, CispoInputs) and functional:
        group = settings.get("group")
        name = group.group_name if group is not None and group.size() > 1 else ""
        inputs = (hidden_TH, weight_VH, targets_T, *loss.of(slice(None)), *grads)
        total, rows_5T, _, _ = ops.linear_cispo(*inputs, **{**settings, "group": name})
        return LinearLoss(total, *rows_5T.detach()[:4])
    function = loss if isinstance(loss, CispoInputs) else coefficients_of(loss)
    total, rows_5T = _Loss.apply(
        hidden_TH, weight_VH, targets_T, function, settings, loss_scale, grads
    )
    return LinearLoss(total, *rows_5T[:4])


def linear_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, **settings: Unpack[HeadSettings]
) -> tuple[Tensor, Tensor]:
    """Return log-probs [T] with and entropies [T] without gradient; arguments as `linear_loss`."""
    logprobs_T, entropy_T = _LogProbs.apply(hidden_TH, weight_VH, targets_T, settings)
    return logprobs_T, entropy_T
