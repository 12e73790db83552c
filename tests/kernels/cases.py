"""Inputs with their float64 results. Shapes: T tokens, H hidden, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rl.kernels.fused import LinearLoss, linear_loss
from megatron_rl.kernels.linear import CispoInputs
from tests.sums import sum_error

CAP = 5.0


@dataclass
class Truth:
    """Float64 results, and the sums of absolute terms that their fp32 errors are in proportion to.

    A log-prob that is off by d multiplies its ratio by 1 + d: its coefficient c and its row of the
    gradient are off by d times themselves, its loss term by d c and by d times itself. Logits of up
    to 16 are rounded to 2^-20 at each addition, so d is some 1e-6 (at most 1e-5) of either sign:
    2e-6 for gradients, which few tokens may dominate, and 1e-6 for losses, sums of many.
    """

    terms_T: Tensor
    """The loss is their sum."""
    logprobs_T: Tensor
    entropy_T: Tensor
    ratio_T: Tensor
    coefficient_T: Tensor
    logit_grads_TV: Tensor
    hidden_grad_TH: Tensor = field(default_factory=torch.Tensor)
    hidden_terms_TH: Tensor = field(default_factory=torch.Tensor)
    weight_grad_VH: Tensor = field(default_factory=torch.Tensor)
    weight_terms_VH: Tensor = field(default_factory=torch.Tensor)

    @property
    def loss(self) -> Tensor:
        return self.terms_T.sum()

    def loss_error(self, loss: Tensor, want: Tensor | None = None) -> float:
        """Return the error of a loss, or its distance from another one."""
        size = self.terms_T.abs().sum() + self.coefficient_T.abs().sum()
        return sum_error(loss, self.loss if want is None else want.detach(), size)

    def hidden_error(self, grad_TH: Tensor | None) -> float:
        assert grad_TH is not None
        return sum_error(grad_TH, self.hidden_grad_TH, self.hidden_terms_TH)

    def weight_error(self, grad_VH: Tensor | None) -> float:
        assert grad_VH is not None
        return sum_error(grad_VH, self.weight_grad_VH, self.weight_terms_VH)

    def with_operands(self, hidden_TH: Tensor, weight_VH: Tensor) -> Truth:
        """Add the gradients of the operands of the logits."""
        g, h, w = self.logit_grads_TV, hidden_TH.double(), weight_VH.double()
        self.hidden_grad_TH, self.hidden_terms_TH = g @ w, g.abs() @ w.abs()
        self.weight_grad_VH, self.weight_terms_VH = g.T @ h, g.abs().T @ h.abs()
        return self


def cispo_inputs(T: int, logprobs_T: Tensor, seed: int = 1) -> CispoInputs:
    """Make ratios on both sides of the cap, advantages of both signs, some rows of weight 0."""
    g = torch.Generator().manual_seed(seed)
    noise_T = torch.randn(T, generator=g) * 1.5
    weights_T = torch.rand(T, generator=g) / T
    weights_T[::5] = 0.0
    return CispoInputs(logprobs_T.float() - noise_T, torch.randn(T, generator=g), weights_T, CAP)


def truth_of_logits(
    logits_TV: Tensor,
    targets_T: Tensor,
    loss: CispoInputs,
    columns: int,
    temperature: float = 1.0,
    terms: Callable[[Tensor], Tensor] | None = None,
) -> Truth:
    """Compute everything from logits in float64; columns from `columns` on have no probability.

    `terms` are those of another loss than CISPO, by log-probs [T].
    """
    z_TV = logits_TV.double() / temperature
    z_TV[:, columns:] = float("-inf")
    log_p_TV = torch.log_softmax(z_TV, -1)
    logprobs_T = log_p_TV.gather(1, targets_T[:, None])[:, 0]
    p_TV = log_p_TV.exp()
    ratio_T = (logprobs_T - loss.generator_logprobs_T.double()).exp()
    if terms is None:
        c_T = -(loss.weights_T * loss.advantages_T.double()) * ratio_T.clamp(max=loss.max_ratio)
        c_T = torch.where(loss.weights_T == 0, 0.0, c_T)
        terms_T = torch.where(c_T == 0, 0.0, c_T * logprobs_T)
    else:
        leaf_T = logprobs_T.clone().requires_grad_()
        terms_T = terms(leaf_T)
        (c_T,) = torch.autograd.grad(terms_T.sum(), leaf_T)
        terms_T = terms_T.detach()
    one_hot_TV = torch.nn.functional.one_hot(targets_T, logits_TV.shape[1]).double()
    return Truth(
        terms_T=terms_T,
        logprobs_T=logprobs_T,
        entropy_T=-torch.where(p_TV > 0, p_TV * log_p_TV, 0.0).sum(-1),
        ratio_T=ratio_T,
        coefficient_T=c_T,
        logit_grads_TV=c_T[:, None] * (one_hot_TV - p_TV) / temperature,
    )


@dataclass
class Case:
    hidden_TH: Tensor
    weight_VH: Tensor
    targets_T: Tensor
    loss: CispoInputs
    truth: Truth
    vocabulary: int
    temperature: float

    def truth_of(self, terms: Callable[[Tensor], Tensor]) -> Truth:
        """Return the float64 results of another loss: log-probs [T] -> terms, one each or fewer."""
        logits_TV = self.hidden_TH.double() @ self.weight_VH.double().T
        return truth_of_logits(
            logits_TV, self.targets_T, self.loss, self.vocabulary, self.temperature, terms
        ).with_operands(self.hidden_TH, self.weight_VH)


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
    """Make a head whose logits span about +-16, with its float64 gradients."""
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
    truth.with_operands(hidden_TH, weight_VH)
    return Case(hidden_TH, weight_VH, targets_T, loss, truth, vocabulary, temperature)


def relative(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / |b| in the Euclidean norm, in float64."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def largest(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference."""
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
    """Run forward and backward; return the result and the weight gradient (main_grad if any)."""
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
