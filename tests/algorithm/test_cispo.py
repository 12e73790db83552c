"""CISPO against its closed form: values and gradients token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithm.losses.cispo import Cispo
from megatron_rl.algorithm.objective import Sums
from tests.algorithm.tokens import summed, tokens
from tests.sums import sum_error

CAP = 5.0
logs = st.floats(-20.0, 0.0, width=32)
token = st.tuples(logs, logs, st.floats(-3, 3, width=32), st.floats(0, 1, width=32))


def cispo(*columns: list[float]) -> tuple[Sums, list[float]]:
    """Return the sums of log-probs, generator's, advantages and weights, and the gradient."""
    return summed(Cispo(max_ratio=CAP), tokens(*columns))


@given(st.lists(token, min_size=1, max_size=8))
def test_value_and_gradient_equal_the_closed_form(rows: list[tuple[float, ...]]) -> None:
    sums, gradient = cispo(*map(list, zip(*rows, strict=True)))
    terms = []
    for i, (logp, gen, advantage, weight) in enumerate(rows):
        coefficient = -weight * min(math.exp(logp - gen), CAP) * advantage
        terms.append(coefficient * logp)
        assert math.isclose(gradient[i], coefficient, rel_tol=1e-12, abs_tol=1e-15)
    want = torch.tensor(terms, dtype=torch.float64)
    # exp is off by some 2^-52, and so are the terms.
    assert sum_error(sums.loss, want.sum(), want.abs().sum()) < 1e-14
    assert sums.tokens == sum(row[3] > 0 for row in rows)
    assert sums.clipped == sum(row[3] > 0 and math.exp(row[0] - row[1]) > CAP for row in rows)


def test_on_policy_gradient_is_reinforce_and_not_zero() -> None:
    # rho = 1: dL/dlogp = -w A. A surrogate that lost its log-prob factor would give 0 here.
    sums, gradient = cispo([-1.0, -2.0], [-1.0, -2.0], [2.0, -1.0], [0.5, 0.25])
    assert gradient == [-1.0, 0.25]
    assert sums.loss.item() == 0.5 * 2.0 * 1.0 - 0.25 * 1.0 * 2.0


def test_a_token_beyond_the_cap_keeps_the_capped_gradient_on_both_sides() -> None:
    # rho = e^3 = 20 > 5: PPO's clip would drop the token of positive advantage altogether.
    sums, gradient = cispo([-1.0, -1.0, -4.0], [-4.0, -4.0, -1.0], [1.0, -1.0, 1.0], [1.0] * 3)
    low = math.exp(-3.0)  # the lower side is not truncated
    assert gradient == pytest.approx([-CAP, CAP, -low], rel=1e-12)
    assert sums.clipped == 2


def test_weight_zero_counts_nowhere() -> None:
    # The forced token has no generator log-prob (0) and an advantage all the same.
    sums, gradient = cispo([-1.0, -1.0], [-1.0, 0.0], [1.0, 1.0], [1.0, 0.0])
    assert gradient == [-1.0, 0.0]
    assert (sums.tokens, sums.clipped) == (1, 0)
