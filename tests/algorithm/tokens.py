"""Tokens of the loss tests: plain columns of numbers in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithm.losses.base import Loss, Tokens
from megatron_rl.algorithm.objective import Sums, objective
from megatron_rl.algorithm.settings import Algorithm


def tokens(
    logprobs: Sequence[float],
    generator: Sequence[float],
    advantages: Sequence[float],
    weights: Sequence[float] | None = None,
    *,
    old: Sequence[float] | None = None,
    sequences: Sequence[int] | None = None,
    **more: Any,
) -> Tokens:
    """Tokens of one completion (or of `sequences`) with these log-probs, weight 1 by default."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    n = len(logprobs)
    numbers = [0] * n if sequences is None else list(sequences)
    return Tokens(
        logprobs_T=column(logprobs).requires_grad_(),
        generator_logprobs_T=column(generator),
        old_logprobs_T=column(generator if old is None else old),
        advantages_T=column(advantages),
        loss_weights_T=column([1.0] * n if weights is None else weights),
        sequences_T=torch.tensor(numbers),
        sequences=max(numbers, default=-1) + 1,
        **more,
    )


def summed(loss: Loss, given: Tokens, **algorithm: Any) -> tuple[Sums, list[float]]:
    """Return the objective of this loss, and its gradient by each log-prob."""
    a = Algorithm(loss=loss)
    a = a.model_copy(update=algorithm)
    sums = objective(a, given)
    (gradient,) = torch.autograd.grad(sums.loss, given.logprobs_T)
    return sums._replace(loss=sums.loss.detach()), gradient.tolist()
