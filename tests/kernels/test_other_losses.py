"""Losses other than CISPO: single log-probs in one pass, sequence sums in two, both exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.kernels.fused import linear_logprobs
from tests.kernels.cases import Case, largest, leaves, linear_case, rows_of_memory, run


def clipped(case: Case) -> Any:
    """PPO's clip with a dual sign, as GRPO and DAPO use it: not CISPO, but per token."""

    def loss(logprobs_C: Tensor, place: slice) -> Tensor:
        ratio_C = (logprobs_C - case.loss.generator_logprobs_T[place].to(logprobs_C)).exp()
        a_C = case.loss.advantages_T[place].to(logprobs_C)
        w_C = case.loss.weights_T[place].to(logprobs_C)
        return -w_C * torch.minimum(ratio_C * a_C, ratio_C.clamp(0.8, 1.26) * a_C)

    return loss


def gspo(case: Case, logprobs_T: Tensor) -> Tensor:
    """One term per sequence of its ratio: coefficients of tokens need sums over sequences."""
    sequence_T = torch.arange(len(logprobs_T)) // 10
    n = int(sequence_T[-1]) + 1
    delta_T = logprobs_T - case.loss.generator_logprobs_T.to(logprobs_T)
    zeros = torch.zeros(n).to(logprobs_T)
    count = zeros.index_add(0, sequence_T, torch.ones_like(delta_T))
    ratio_S = (zeros.index_add(0, sequence_T, delta_T) / count).exp()
    a_S = torch.linspace(-1, 1, n).to(logprobs_T)
    return -torch.minimum(ratio_S * a_S, ratio_S.clamp(0.9, 1.1) * a_S)


def test_any_loss_of_single_log_probs_takes_the_one_pass_path() -> None:
    case = linear_case(57, 64, 509, torch.float32, temperature=0.9)
    function = clipped(case)
    truth = case.truth_of(lambda logp: function(logp, slice(None)))
    leaf = leaves(case)
    got, weight_grad_VH = run(case, leaf, function, chunk_bytes=rows_of_memory(case, 10))
    assert truth.loss_error(got.loss) < 1e-6
    assert truth.weight_error(weight_grad_VH) < 2e-6
    assert truth.hidden_error(leaf[0].grad) < 2e-6


def test_a_loss_that_mixes_tokens_is_refused_by_the_one_pass_path() -> None:
    case = linear_case(20, 32, 67)
    with pytest.raises(ValueError, match="one term per token"):
        run(case, leaves(case), lambda logp, place: logp.sum())


@pytest.mark.parametrize("main_grad", [False, True])
def test_a_sequence_loss_takes_the_two_pass_path_exactly(main_grad: bool) -> None:
    case = linear_case(57, 64, 509, torch.float32)
    truth = case.truth_of(lambda logp: gspo(case, logp))
    hidden_TH, weight_VH = leaves(case, main_grad=main_grad)
    logprobs_T, entropy_T = linear_logprobs(
        hidden_TH, weight_VH, case.targets_T, chunk_bytes=rows_of_memory(case, 10)
    )
    assert not entropy_T.requires_grad
    assert largest(entropy_T, case.truth.entropy_T) < 1e-5
    loss = gspo(case, logprobs_T).sum()
    loss.backward()
    assert truth.loss_error(loss) < 1e-6
    weight_grad_VH = weight_VH.main_grad if main_grad else weight_VH.grad  # type: ignore[attr-defined]
    assert truth.weight_error(weight_grad_VH) < 2e-6
    assert truth.hidden_error(hidden_TH.grad) < 2e-6
