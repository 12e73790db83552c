"""CISPO against its closed form: values and gradients token by token."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithm.losses.cispo import cispo

CAP = 5.0
logs = st.floats(-20.0, 0.0, width=32)
token = st.tuples(logs, logs, st.floats(-3, 3, width=32), st.floats(0, 1, width=32))


def columns(rows: list[tuple[float, ...]]) -> list[torch.Tensor]:
    return [torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True)]


@given(st.lists(token, min_size=1, max_size=8))
def test_value_and_gradient_equal_the_closed_form(rows: list[tuple[float, ...]]) -> None:
    logprobs, generator, advantages, weights = columns(rows)
    logprobs.requires_grad_()
    sums = cispo(logprobs, generator, advantages, weights, CAP)
    sums.loss.backward()
    want = 0.0
    for i, (logp, gen, advantage, weight) in enumerate(rows):
        coefficient = -weight * min(math.exp(logp - gen), CAP) * advantage
        want += coefficient * logp
        assert math.isclose(logprobs.grad[i], coefficient, rel_tol=1e-12, abs_tol=1e-15)
    assert math.isclose(sums.loss.item(), want, rel_tol=1e-9, abs_tol=1e-12)
    assert sums.tokens == sum(row[3] > 0 for row in rows)
    assert sums.clipped == sum(row[3] > 0 and math.exp(row[0] - row[1]) > CAP for row in rows)


def test_on_policy_gradient_is_reinforce_and_not_zero() -> None:
    # rho = 1: dL/dlogp = -w A. A surrogate that lost its log-prob factor would give 0 here.
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages, weights = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.25])
    loss = cispo(logprobs, logprobs.detach(), advantages, weights, CAP).loss
    loss.backward()
    assert logprobs.grad.tolist() == [-1.0, 0.25]
    assert loss.item() == 0.5 * 2.0 * 1.0 - 0.25 * 1.0 * 2.0


def test_a_token_beyond_the_cap_keeps_the_capped_gradient_on_both_sides() -> None:
    # rho = e^3 = 20 > 5: PPO's clip would drop the token of positive advantage altogether.
    logprobs = torch.tensor([-1.0, -1.0, -4.0], requires_grad=True)
    generator = torch.tensor([-4.0, -4.0, -1.0])
    sums = cispo(logprobs, generator, torch.tensor([1.0, -1.0, 1.0]), torch.ones(3), CAP)
    sums.loss.backward()
    low = math.exp(-3.0)  # the lower side is not truncated
    torch.testing.assert_close(logprobs.grad, torch.tensor([-CAP, CAP, -low]))
    assert sums.clipped == 2


def test_splitting_the_tokens_changes_nothing() -> None:
    rng = torch.Generator().manual_seed(0)
    x = [torch.randn(10, generator=rng, dtype=torch.float64) for _ in range(4)]
    x[3] = x[3].abs()
    whole = cispo(*x, CAP)
    parts = [cispo(*(t[a:b] for t in x), CAP) for a, b in ((0, 3), (3, 3), (3, 10))]
    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss)
    assert sum(p.clipped for p in parts) == whole.clipped


def test_weight_zero_counts_nowhere() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    # The forced token has no generator log-prob (0) and an advantage all the same.
    sums = cispo(logprobs, torch.tensor([-1.0, 0.0]), torch.ones(2), torch.tensor([1.0, 0.0]), CAP)
    sums.loss.backward()
    assert logprobs.grad.tolist() == [-1.0, 0.0]
    assert (sums.tokens, sums.clipped) == (1, 0)
