"""Importance corrections, the KL term and the entropy term, by hand and against autograd."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithm.corrections import SequenceMask, TokenMask, TokenTruncation
from megatron_rl.algorithm.losses.cispo import Cispo
from megatron_rl.algorithm.losses.ppo import PpoClip
from megatron_rl.algorithm.losses.reinforce import Reinforce
from megatron_rl.algorithm.objective import objective
from megatron_rl.algorithm.settings import Algorithm
from tests.algorithm.tokens import summed, tokens

ln = math.log


def gaps(*ratios: float) -> list[float]:
    """Return generator log-probs for which an old log-prob of -1 has these ratios."""
    return [-1.0 - ln(r) for r in ratios]


def test_token_truncation_caps_the_factor() -> None:
    # pi = pi_old: the loss's own ratio is 1, its gradient -w A; factors .5, 2 (of 3) and 1
    given = tokens([-1] * 3, gaps(0.5, 3, 1), [1, 1, -2], old=[-1] * 3)
    sums, gradient = summed(PpoClip(), given, correction=TokenTruncation(max_ratio=2.0))
    assert gradient == pytest.approx([-0.5, -2.0, 2.0])
    assert sums.corrected == 1


def test_token_mask_keeps_the_ratio_inside_and_drops_the_token_outside() -> None:
    given = tokens([-1] * 3, gaps(0.4, 0.8, 6), [1, 1, 1], old=[-1] * 3)
    sums, gradient = summed(PpoClip(), given, correction=TokenMask(min_ratio=0.5, max_ratio=5.0))
    assert gradient == pytest.approx([0.0, -0.8, 0.0])
    assert sums.corrected == 2


def test_sequence_mask_drops_drifted_sequences_of_negative_advantage() -> None:
    # mean(log pi_gen - log pi): sequences 0 and 1: (.3 + .1) / 2 = .2; sequence 2: .05
    given = tokens(
        [-1] * 5, [-0.7, -0.9, -0.7, -0.9, -0.95], [-1, -1, 1, 1, -1],
        sequences=[0, 0, 1, 1, 2], old=[-1] * 5,
    )  # fmt: skip
    sums, gradient = summed(PpoClip(), given, correction=SequenceMask(max_drift_nats=0.1))
    assert gradient == pytest.approx([0.0, 0.0, -1.0, -1.0, 1.0])
    assert sums.corrected == 2


def test_the_factor_has_no_gradient_of_its_own() -> None:
    given = tokens([-1.2], gaps(1.7), [1.0], old=[-1.0])
    _, gradient = summed(PpoClip(), given, correction=TokenTruncation(max_ratio=2.0))
    assert gradient == pytest.approx([-1.7 * math.exp(-0.2)])


def test_reinforce_with_truncation_is_cispo() -> None:
    # For REINFORCE the trainer hands over the current policy as the old one.
    columns = ([-1.0, -0.3, -2.0], gaps(0.5, 8, 1.5), [2.0, -1.0, 0.5], [0.5, 0.25, 1.0])
    given = tokens(*columns, old=columns[0])
    tis = summed(Reinforce(), given, correction=TokenTruncation(max_ratio=3.0))
    cispo = summed(Cispo(max_ratio=3.0), tokens(*columns))
    assert tis[0].loss.item() == pytest.approx(cispo[0].loss.item())
    assert tis[1] == pytest.approx(cispo[1])


def test_kl_to_a_reference_is_k3_with_its_gradient() -> None:
    # d = ref - logp = .5 and -.25: k3 = e^d - d - 1; dk3/dlogp = 1 - e^d
    reference = torch.tensor([-0.5, -1.25], dtype=torch.float64)
    given = tokens([-1, -1], [-1, -1], [0, 0], [2.0, 0.5], reference_logprobs_T=reference)
    sums, gradient = summed(Reinforce(), given, kl_coefficient=0.1)
    k3 = [math.exp(d) - d - 1 for d in (0.5, -0.25)]
    assert sums.loss.item() == pytest.approx(0.1 * (2.0 * k3[0] + 0.5 * k3[1]))
    assert sums.reference_kl.item() == pytest.approx(sum(k3))
    assert gradient == pytest.approx([0.2 * (1 - math.exp(0.5)), 0.05 * (1 - math.exp(-0.25))])


def test_kl_is_zero_without_gradient_at_the_reference() -> None:
    reference = torch.tensor([-1.0], dtype=torch.float64)
    given = tokens([-1], [-1], [0.0], reference_logprobs_T=reference)
    sums, gradient = summed(Reinforce(), given, kl_coefficient=0.1)
    assert (sums.loss.item(), gradient) == (0.0, [0.0])


def test_the_entropy_term_rewards_entropy() -> None:
    logits = torch.tensor([[0.3, -0.2, 1.0]], dtype=torch.float64, requires_grad=True)
    p = torch.softmax(logits, -1)
    entropy = -(p * p.log()).sum(-1)
    given = tokens([-1.0], [-1.0], [0.0], [0.5], entropy_T=entropy)
    algorithm = Algorithm(loss=Reinforce(), entropy_coefficient=0.2)
    loss = objective(algorithm, given).loss
    assert loss.item() == pytest.approx(-0.2 * 0.5 * entropy.item())
    (gradient,) = torch.autograd.grad(loss, logits)
    # dH/dx_j = -p_j (log p_j + H)
    want = 0.1 * p * (p.log() + entropy)
    torch.testing.assert_close(gradient, want.detach())


def test_terms_without_what_they_need_are_refused() -> None:
    given = tokens([-1.0], [-1.0], [1.0])
    with pytest.raises(ValueError, match=r"algorithm\.kl_coefficient is 0\.1.*reference"):
        objective(Algorithm(kl_coefficient=0.1), given)
    with pytest.raises(ValueError, match=r"algorithm\.entropy_coefficient is 0\.2"):
        objective(Algorithm(entropy_coefficient=0.2), given)
