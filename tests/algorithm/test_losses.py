"""Each loss against its closed form, its gradient against finite differences, and its invariances.

CISPO has a file of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from megatron_rl.algorithm.losses import LossChoice
from megatron_rl.algorithm.losses.base import Loss, Tokens
from megatron_rl.algorithm.losses.cispo import Cispo
from megatron_rl.algorithm.losses.dispo import Dispo
from megatron_rl.algorithm.losses.dppo import Dppo
from megatron_rl.algorithm.losses.gspo import Gspo
from megatron_rl.algorithm.losses.mini_rl import MiniRl
from megatron_rl.algorithm.losses.ppo import PpoClip
from megatron_rl.algorithm.losses.reinforce import Reinforce
from megatron_rl.algorithm.objective import objective, objective_terms
from megatron_rl.algorithm.settings import Algorithm
from tests.algorithm.tokens import summed, tokens
from tests.sums import sum_error

ln = math.log

VARIANTS: list[Loss] = [
    Cispo(max_ratio=1.5),
    Dispo(positive_max_ratio=1.3, negative_min_ratio=0.8, negative_max_ratio=1.6),
    Dppo(max_divergence=0.1),
    Dppo(divergence="binary_kl", max_divergence=0.02, max_ratio=1.5),
    Gspo(min_ratio=0.9, max_ratio=1.1),
    MiniRl(max_weight_ratio=1.4),
    PpoClip(),
    PpoClip(min_ratio=0.8, max_ratio=1.28, dual_clip_ratio=1.5),
    Reinforce(),
]
IDS = [f"{i}-{loss.kind}" for i, loss in enumerate(VARIANTS)]
every_loss = pytest.mark.parametrize("loss", VARIANTS, ids=IDS)


def random_tokens(n: int = 40, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tokens:
    """Completions of up to 7 tokens, with zero weights and zero advantages among them."""
    rng = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(n, generator=rng, dtype=torch.float64) * scale

    logprobs = -(normal(1.0).abs() + 0.05)
    sequences = torch.arange(n) // 7
    advantages = normal(1.0)[sequences]
    weights = torch.rand(n, generator=rng, dtype=torch.float64) + 0.1
    weights[::9] = 0.0
    weights[sequences == 2] = 0.0
    advantages[sequences == 3] = 0.0
    return Tokens(
        logprobs_T=logprobs.to(dtype, copy=True).requires_grad_(),
        generator_logprobs_T=(logprobs + normal(0.3)).clamp(max=-0.01).to(dtype),
        old_logprobs_T=(logprobs + normal(0.3)).clamp(max=-0.01).to(dtype),
        advantages_T=advantages.to(dtype),
        loss_weights_T=weights.to(dtype),
        sequences_T=sequences,
        sequences=int(sequences.max()) + 1,
    )


def test_all_losses_of_the_registry_are_tested_here() -> None:
    union = get_args(LossChoice)[0]
    assert {type(loss) for loss in VARIANTS} == set(get_args(union))


# ---------------------------------------------------------------- closed forms


def test_reinforce_is_minus_weighted_advantage_times_logprob() -> None:
    # 0.5 * -(2 * -1) + 0.25 * -(-1 * -3) = 1 - 0.75
    sums, gradient = summed(Reinforce(), tokens([-1, -3], [-1, -2], [2, -1], [0.5, 0.25]))
    assert sums.loss.item() == pytest.approx(0.25)
    assert gradient == pytest.approx([-0.5 * 2, 0.25])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "cut"),
    [
        # -min(r A, clip(r, .8, 1.2) A); the gradient by the log-prob is -r A where it is not cut
        (1.0, 2.0, -2.0, -2.0, False),
        (1.5, 2.0, -2.4, 0.0, True),  # min(3, 2.4)
        (0.5, 2.0, -1.0, -1.0, False),  # min(1, 1.6): moving back up stays open
        (1.5, -2.0, 3.0, 3.0, False),  # min(-3, -2.4)
        (0.5, -2.0, 1.6, 0.0, True),  # min(-1, -1.6)
    ],
)
def test_ppo_clips_the_side_that_moves_on(
    ratio: float, advantage: float, loss: float, gradient: float, cut: bool
) -> None:
    given = tokens([-1.0], [-1.0], [advantage], old=[-1.0 - ln(ratio)])
    sums, found = summed(PpoClip(), given, old_policy="trainer")
    assert sums.loss.item() == pytest.approx(loss)
    assert found == pytest.approx([gradient])
    assert sums.clipped == cut


def test_dapo_clips_higher_above_than_below() -> None:
    # r = 1.25: beyond GRPO's 1.2 and within DAPO's 1.28
    given = tokens([-1.0], [-1.0 - ln(1.25)], [1.0])
    assert summed(PpoClip(), given)[1] == [0.0]
    assert summed(PpoClip(max_ratio=1.28), given)[1] == pytest.approx([-1.25])


def test_dual_clip_bounds_negative_advantages_from_below() -> None:
    # r = 4, A = -2, c = 3: max(min(-8, -2.4), -6) = -6, without gradient; A = 2 is untouched by c
    given = tokens([-1.0, -1.0], [-1.0 - ln(4)] * 2, [-2.0, 2.0])
    sums, gradient = summed(PpoClip(dual_clip_ratio=3.0), given)
    assert sums.loss.item() == pytest.approx(6.0 - 2.4)
    assert gradient == [0.0, 0.0]
    assert sums.clipped == 2


def test_gspo_has_one_ratio_per_sequence_of_the_mean_log_ratio() -> None:
    # log-ratios .1 and .3 -> s = e^.2 for both tokens; the other sequence: -.1 -> e^-.1
    given = tokens([-1, -1, -1], [-1.1, -1.3, -0.9], [1, 1, 2], [0.5, 0.5, 1], sequences=[0, 0, 1])
    sums, gradient = summed(Gspo(min_ratio=0.5, max_ratio=2.0), given)
    s, other = math.exp(0.2), math.exp(-0.1)
    assert sums.loss.item() == pytest.approx(-(s + 2 * other))
    assert gradient == pytest.approx([-0.5 * s, -0.5 * s, -2 * other])


def test_gspo_clips_whole_sequences() -> None:
    given = tokens([-1, -1, -1], [-1.1, -1.3, -0.9], [1, 1, 2], [0.5, 0.5, 1], sequences=[0, 0, 1])
    sums, gradient = summed(Gspo(min_ratio=0.5, max_ratio=1.1), given)
    assert sums.loss.item() == pytest.approx(-(1.1 + 2 * math.exp(-0.1)))
    assert gradient == pytest.approx([0.0, 0.0, -2 * math.exp(-0.1)])
    assert sums.clipped == 2


def test_gspo_gradient_is_that_of_the_papers_sequence_objective() -> None:
    # With equal weights in a sequence, (1/|y|) sum_t s A has the gradient s A / |y| per token, as
    # differentiating s_i A_i = exp(mean log-ratio) A_i has.
    x = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.2, -1.9, -0.6], dtype=torch.float64)
    (want,) = torch.autograd.grad(-torch.exp((x - old).mean()) * 0.7, x)
    given = tokens(x.tolist(), old.tolist(), [0.7] * 3, [1 / 3] * 3)
    assert summed(Gspo(min_ratio=0.1, max_ratio=9.0), given)[1] == pytest.approx(want.tolist())


def test_gspo_leaves_forced_tokens_out_of_the_mean() -> None:
    # The forced token in the middle has generator log-prob 0 and weight 0.
    given = tokens([-1, -7, -1], [-1.1, 0, -1.3], [1, 1, 1], [1, 0, 1])
    _, gradient = summed(Gspo(min_ratio=0.5, max_ratio=2.0), given)
    assert gradient == pytest.approx([-math.exp(0.2), 0.0, -math.exp(0.2)])


def test_dispo_bounds_right_and_wrong_completions_apart() -> None:
    # rho = 3 and .5; A > 0: [0, 2], A < 0: [.8, 4]
    loss = Dispo(
        positive_min_ratio=0.0,
        positive_max_ratio=2.0,
        negative_min_ratio=0.8,
        negative_max_ratio=4.0,
    )
    given = tokens([-1] * 4, [-1 - ln(3), -1 - ln(0.5)] * 2, [1, 1, -1, -1])
    sums, gradient = summed(loss, given)
    assert gradient == pytest.approx([-2.0, -0.5, 3.0, 0.8])
    assert sums.loss.item() == pytest.approx(2.0 + 0.5 - 3.0 - 0.8)
    assert sums.clipped == 2


@pytest.mark.parametrize(
    ("p", "q", "advantage", "masked"),
    [
        (0.6, 0.4, 1.0, True),  # TV .2 > .15, moving on up
        (0.6, 0.4, -1.0, False),  # moving back
        (0.4, 0.6, -1.0, True),
        (0.4, 0.6, 1.0, False),
        (0.5, 0.4, 1.0, False),  # TV .1
        (0.002, 0.0001, 1.0, False),  # ratio 20, and hardly any probability moved
    ],
)
def test_dppo_masks_by_total_variation_and_not_by_ratio(
    p: float, q: float, advantage: float, masked: bool
) -> None:
    sums, gradient = summed(Dppo(), tokens([ln(p)], [ln(q)], [advantage]))
    assert gradient == pytest.approx([0.0 if masked else -(p / q) * advantage])
    assert sums.clipped == masked


def test_dppo_kl_is_that_of_the_two_outcome_distributions() -> None:
    # KL((.4, .6) || (.6, .4)) = .4 ln(.4/.6) + .6 ln(.6/.4) = .0811
    kl = 0.4 * ln(0.4 / 0.6) + 0.6 * ln(0.6 / 0.4)
    for bound, masked in ((kl - 1e-6, True), (kl + 1e-6, False)):
        loss = Dppo(divergence="binary_kl", max_divergence=bound)
        _, gradient = summed(loss, tokens([ln(0.6)], [ln(0.4)], [1.0]))
        assert gradient == pytest.approx([0.0 if masked else -1.5])


def test_dppo_kl_is_finite_where_a_probability_is_one() -> None:
    loss = Dppo(divergence="binary_kl", max_divergence=0.05)
    sums, gradient = summed(loss, tokens([0.0, ln(0.5)], [ln(0.5), 0.0], [1.0, -1.0]))
    assert math.isfinite(sums.loss.item())
    assert gradient == [0.0, 0.0]


def test_mini_rl_weighs_against_the_generator_and_masks_against_the_old_policy() -> None:
    # pi / pi_gen = 6, capped at 5; pi / pi_old = 1.2 (kept), 1.3 (masked), 1.3 (A < 0: kept)
    given = tokens(
        [-1] * 3, [-1 - ln(6)] * 3, [1, 1, -1], old=[-1 - ln(1.2), -1 - ln(1.3), -1 - ln(1.3)]
    )
    sums, gradient = summed(MiniRl(), given)
    assert gradient == pytest.approx([-5.0, 0.0, 5.0])
    assert sums.clipped == 1


def test_losses_agree_where_the_policy_has_not_moved() -> None:
    # ratio 1 everywhere: each gradient is REINFORCE's, -w A.
    for loss in VARIANTS:
        _, gradient = summed(loss, tokens([-1, -2], [-1, -2], [2, -1], [0.5, 0.25]))
        assert gradient == pytest.approx([-1.0, 0.25]), loss.kind


# ---------------------------------------------------------------- properties of all


def smooth(given: Tokens, loss: Loss) -> torch.Tensor:
    """Tokens whose own term is far from every bound, so that a difference quotient exists."""
    ratios = [
        (given.logprobs_T.detach() - other).exp()
        for other in (given.generator_logprobs_T, given.old_logprobs_T)
    ]
    bounds = [v for k, v in loss.model_dump().items() if "ratio" in k and v]
    far = torch.ones(len(given.logprobs_T), dtype=torch.bool)
    for ratio in ratios:
        for bound in bounds:
            far &= (ratio - bound).abs() > 1e-3
    return far


DETACHED = {"cispo", "dispo", "dppo", "mini_rl", "gspo"}


@every_loss
def test_gradient_equals_finite_differences_of_the_objective(loss: Loss) -> None:
    """Detached coefficients are constants: they are held at the point of differentiation.

    GSPO's gradient is that of each token's own surrogate with the others' part of the ratio held.
    """
    given, step = random_tokens(), 1e-6
    _, gradient = summed(loss, given)

    def value(moved: int, by: float) -> float:
        logprobs = given.logprobs_T.detach().clone()
        logprobs[moved] += by
        if loss.kind not in DETACHED:
            return objective(_algorithm(loss), replace(given, logprobs_T=logprobs)).loss.item()
        at = loss.terms(given)
        if loss.kind == "gspo":
            ratio = given.mean_by_sequence(given.logprobs_T.detach() - given.old_logprobs_T)
            ratio = (ratio + logprobs - given.logprobs_T.detach()).exp()
            low, high = loss.min_ratio, loss.max_ratio  # type: ignore[attr-defined]
            plain, bounded = ratio, ratio.clamp(low, high)
            a = given.advantages_T
            return (-given.loss_weights_T * torch.minimum(plain * a, bounded * a)).sum().item()
        coefficient = at.loss_T.detach() / given.logprobs_T.detach()
        return (given.loss_weights_T * coefficient * logprobs).sum().item()

    far = smooth(given, loss)
    assert far.sum() > 20
    for i in torch.nonzero(far).flatten().tolist():
        quotient = (value(i, step) - value(i, -step)) / (2 * step)
        assert gradient[i] == pytest.approx(quotient, rel=1e-5, abs=1e-8), i


@every_loss
def test_any_split_of_whole_sequences_has_the_same_sum_and_gradient(loss: Loss) -> None:
    given = random_tokens()
    whole, gradient = summed(loss, given)
    order = [4, 0, 5, 2, 1, 3]  # of the sequences
    parts, back = [], torch.zeros(len(gradient), dtype=torch.float64)
    for chosen in (order[:1], order[1:3], [], order[3:]):
        mask = torch.isin(given.sequences_T, torch.tensor(chosen, dtype=torch.long))
        own = _part(given, torch.nonzero(mask).flatten())
        sums, found = summed(loss, own)
        parts.append(sums)
        back[mask] = torch.tensor(found, dtype=torch.float64)
    joined = torch.stack([p.loss for p in parts]).sum()
    assert sum_error(joined, whole.loss, absolute_terms(given, loss)) < 1e-14
    assert sum(int(p.clipped) for p in parts) == int(whole.clipped)
    assert back.tolist() == pytest.approx(gradient, rel=1e-12, abs=1e-15)


@every_loss
def test_weight_zero_gives_no_gradient_and_is_counted_nowhere(loss: Loss) -> None:
    given = random_tokens()
    sums, gradient = summed(loss, given)
    untrained = ~given.trained_T
    assert torch.tensor(gradient)[untrained].abs().max() == 0
    assert int(sums.tokens) == int(given.trained_T.sum())
    # What an untrained token says changes nothing else.
    changed = replace(
        given,
        advantages_T=torch.where(untrained, given.advantages_T + 3.0, given.advantages_T),
        generator_logprobs_T=torch.where(untrained, -9.0, given.generator_logprobs_T),
        old_logprobs_T=torch.where(untrained, -9.0, given.old_logprobs_T),
    )
    again, other = summed(loss, changed)
    assert sum_error(again.loss, sums.loss, absolute_terms(given, loss)) < 1e-14
    assert other == pytest.approx(gradient, rel=1e-12, abs=1e-15)
    assert int(again.clipped) == int(sums.clipped)


@every_loss
def test_advantage_zero_gives_no_gradient(loss: Loss) -> None:
    given = random_tokens()
    _, gradient = summed(loss, given)
    assert torch.tensor(gradient)[given.advantages_T == 0].abs().max() == 0


@every_loss
def test_no_tokens_at_all_give_zero_with_a_gradient(loss: Loss) -> None:
    empty = _part(random_tokens(), torch.zeros(0, dtype=torch.long))
    sums, gradient = summed(loss, empty)
    assert float(sums.loss) == 0.0
    assert gradient == []
    assert (int(sums.tokens), int(sums.clipped)) == (0, 0)


@every_loss
def test_fp32_agrees_with_float64(loss: Loss) -> None:
    exact, single = random_tokens(), random_tokens(dtype=torch.float32)
    want, gradient = summed(loss, exact)
    found, other = summed(loss, single)
    assert sum_error(found.loss, want.loss, absolute_terms(exact, loss)) < 1e-6
    assert other == pytest.approx(gradient, rel=1e-4, abs=1e-5)


def _part(given: Tokens, index: torch.Tensor) -> Tokens:
    columns: dict[str, Any] = {
        name: getattr(given, name)[index]
        for name in (
            "generator_logprobs_T",
            "old_logprobs_T",
            "advantages_T",
            "loss_weights_T",
            "sequences_T",
        )
    }
    logprobs = given.logprobs_T.detach()[index].requires_grad_()
    return replace(given, logprobs_T=logprobs, **columns)


def absolute_terms(given: Tokens, loss: Loss) -> torch.Tensor:
    """Return the sum of the absolute values of the weighted terms."""
    return objective_terms(_algorithm(loss), given).loss_T.detach().abs().sum()


def _algorithm(loss: Loss) -> Algorithm:
    return Algorithm(loss=loss)
