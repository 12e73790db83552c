"""Inputs, and what float64 says of them. Shapes: T tokens, H hidden, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.kernels.fused import LinearLoss, linear_loss
from megatron_rl.kernels.linear import Cispo

CAP = 5.0


@dataclass
class Truth:
    """Float64 results."""

    loss: Tensor
    logprobs_T: Tensor
    entropy_T: Tensor
    ratio_T: Tensor
    coefficient_T: Tensor
    logit_grads_TV: Tensor
    hidden_grad_TH: Tensor | None = None
    weight_grad_VH: Tensor | None = None


def cispo_inputs(T: int, logprobs_T: Tensor, seed: int = 1) -> Cispo:
    """Ratios on both sides of the cap, advantages of both signs, some rows of weight 0."""
    g = torch.Generator().manual_seed(seed)
    noise_T = torch.randn(T, generator=g) * 1.5
    weights_T = torch.rand(T, generator=g) / T
    weights_T[::5] = 0.0
    return Cispo(logprobs_T.float() - noise_T, torch.randn(T, generator=g), weights_T, CAP)


def truth_of_logits(
    logits_TV: Tensor, targets_T: Tensor, loss: Cispo, columns: int, temperature: float = 1.0
) -> Truth:
    """Everything from logits, in float64; columns from `columns` on have no probability."""
    z_TV = logits_TV.double() / temperature
    z_TV[:, columns:] = float("-inf")
    log_p_TV = torch.log_softmax(z_TV, -1)
    logprobs_T = log_p_TV.gather(1, targets_T[:, None])[:, 0]
    p_TV = log_p_TV.exp()
    ratio_T = (logprobs_T - loss.generator_logprobs_T.double()).exp()
    c_T = -loss.weights_T.double() * loss.advantages_T.double() * ratio_T.clamp(max=loss.max_ratio)
    c_T = torch.where(loss.weights_T == 0, 0.0, c_T)
    grads_TV = c_T[:, None] * (
        torch.nn.functional.one_hot(targets_T, logits_TV.shape[1]).double() - p_TV
    )
    return Truth(
        loss=torch.where(c_T == 0, 0.0, c_T * logprobs_T).sum(),
        logprobs_T=logprobs_T,
        entropy_T=-torch.where(p_TV > 0, p_TV * log_p_TV, 0.0).sum(-1),
        ratio_T=ratio_T,
        coefficient_T=c_T,
        logit_grads_TV=grads_TV / temperature,
    )


@dataclass
class Case:
    hidden_TH: Tensor
    weight_VH: Tensor
    targets_T: Tensor
    loss: Cispo
    truth: Truth
    vocabulary: int
    temperature: float


def linear_case(
    T: int,
    H: int,
    V: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    vocabulary: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
) -> Case:
    """A head whose logits span about +-16, with its float64 gradients."""
    vocabulary = V if vocabulary is None else vocabulary
    g = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(T, H, generator=g).to(dtype)
    weight_VH = (torch.randn(V, H, generator=g) * (3.0 / H**0.5)).to(dtype)
    targets_T = torch.randint(0, vocabulary, (T,), generator=g)
    logits_TV = hidden_TH.double() @ weight_VH.double().T
    z_TV = (logits_TV / temperature)[:, :vocabulary]
    logprobs_T = torch.log_softmax(z_TV, -1).gather(1, targets_T[:, None])[:, 0]
    loss = cispo_inputs(T, logprobs_T)
    truth = truth_of_logits(logits_TV, targets_T, loss, vocabulary, temperature)
    truth.hidden_grad_TH = truth.logit_grads_TV @ weight_VH.double()
    truth.weight_grad_VH = truth.logit_grads_TV.T @ hidden_TH.double()
    return Case(hidden_TH, weight_VH, targets_T, loss, truth, vocabulary, temperature)


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| in the Euclidean norm, in float64."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def largest(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference."""
    return (a.double() - b.double()).abs().max().item()


def leaves(case: Case, main_grad: bool = False) -> tuple[Tensor, Tensor]:
    hidden_TH = case.hidden_TH.clone().requires_grad_()
    weight_VH: Any = case.weight_VH.clone().requires_grad_()
    if main_grad:
        weight_VH.main_grad = torch.zeros(weight_VH.shape)
        weight_VH.grad_added_to_main_grad = False
    return hidden_TH, weight_VH


def run(
    case: Case, leaf: tuple[Tensor, Tensor], loss: Any = None, **kw: Any
) -> tuple[LinearLoss, Tensor]:
    """Forward and backward; returns the result and the fp32 (or own type) weight gradient."""
    hidden_TH, weight_VH = leaf
    result = linear_loss(
        hidden_TH,
        weight_VH,
        case.targets_T,
        case.loss if loss is None else loss,
        temperature=case.temperature,
        vocabulary=case.vocabulary,
        **kw,
    )
    result.loss.backward()
    main_grad: Tensor | None = getattr(weight_VH, "main_grad", None)
    grad = weight_VH.grad if main_grad is None else main_grad
    assert grad is not None
    return result, grad


def rows_of_memory(case: Case, rows: int) -> int:
    return rows * 4 * (case.weight_VH.shape[0] + 128)
