"""Losses other than CISPO: single log-probs in one pass, sequence sums in two, both exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.kernels.fused import linear_logprobs
from tests.kernels.cases import Case, largest, leaves, linear_case, relative, rows_of_memory, run


def clipped(case: Case) -> Any:
    """PPO's clip with a dual sign, as GRPO and DAPO use it: not CISPO, but per token."""

    def loss(logprobs_C: Tensor, place: slice) -> Tensor:
        ratio_C = (logprobs_C - case.loss.generator_logprobs_T[place].to(logprobs_C)).exp()
        a_C = case.loss.advantages_T[place].to(logprobs_C)
        w_C = case.loss.weights_T[place].to(logprobs_C)
        return -w_C * torch.minimum(ratio_C * a_C, ratio_C.clamp(0.8, 1.26) * a_C)

    return loss


def gspo(case: Case, logprobs_T: Tensor) -> Tensor:
    """Sequence ratio: needs sums over sequences before any token's coefficient is known."""
    sequence_T = torch.arange(len(logprobs_T)) // 10
    n = int(sequence_T[-1]) + 1
    delta_T = logprobs_T - case.loss.generator_logprobs_T.to(logprobs_T)
    zeros = torch.zeros(n).to(logprobs_T)
    count = zeros.index_add(0, sequence_T, torch.ones_like(delta_T))
    ratio_S = (zeros.index_add(0, sequence_T, delta_T) / count).exp()
    a_S = torch.linspace(-1, 1, n).to(logprobs_T)
    return -torch.minimum(ratio_S * a_S, ratio_S.clamp(0.9, 1.1) * a_S).sum()


def in_float64(case: Case, loss: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden_TH = case.hidden_TH.double().requires_grad_()
    weight_VH = case.weight_VH.double().requires_grad_()
    z_TV = hidden_TH @ weight_VH.T / case.temperature
    logprobs_T = torch.log_softmax(z_TV, -1).gather(1, case.targets_T[:, None])[:, 0]
    value = loss(logprobs_T)
    value.backward()
    assert hidden_TH.grad is not None
    assert weight_VH.grad is not None
    return value.detach(), hidden_TH.grad, weight_VH.grad


def test_any_loss_of_single_log_probs_takes_the_one_pass_path() -> None:
    case = linear_case(57, 64, 509, torch.float32, temperature=0.9)
    function = clipped(case)
    want = in_float64(case, lambda logp: function(logp, slice(None)).sum())
    leaf = leaves(case)
    got, weight_grad_VH = run(case, leaf, function, chunk_bytes=rows_of_memory(case, 10))
    assert abs(got.loss - want[0]) < 2e-6 * abs(want[0])
    assert relative(weight_grad_VH, want[2]) < 2e-6
    assert relative(leaf[0].grad, want[1]) < 2e-6  # type: ignore[arg-type]


def test_a_loss_that_mixes_tokens_is_refused_by_the_one_pass_path() -> None:
    case = linear_case(20, 32, 67)
    with pytest.raises(ValueError, match="one term per token"):
        run(case, leaves(case), lambda logp, place: logp.sum())


@pytest.mark.parametrize("main_grad", [False, True])
def test_a_sequence_loss_takes_the_two_pass_path_exactly(main_grad: bool) -> None:
    case = linear_case(57, 64, 509, torch.float32)
    want = in_float64(case, lambda logp: gspo(case, logp))
    hidden_TH, weight_VH = leaves(case, main_grad=main_grad)
    logprobs_T, entropy_T = linear_logprobs(
        hidden_TH, weight_VH, case.targets_T, chunk_bytes=rows_of_memory(case, 10)
    )
    assert not entropy_T.requires_grad
    assert largest(entropy_T, case.truth.entropy_T) < 1e-5
    loss = gspo(case, logprobs_T)
    loss.backward()
    assert abs(loss - want[0]) < 2e-6  # a sum of numbers of about +-1 that nearly cancel
    weight_grad_VH = weight_VH.main_grad if main_grad else weight_VH.grad  # type: ignore[attr-defined]
    assert relative(weight_grad_VH, want[2]) < 2e-6
    assert relative(hidden_TH.grad, want[1]) < 2e-6  # type: ignore[arg-type]
