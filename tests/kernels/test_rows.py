"""The row operators against float64, compiled and as the torch reference, on every edge."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.algorithm.losses.cispo import Cispo
from megatron_rl.kernels import cispo_reference
from megatron_rl.kernels.library import load
from megatron_rl.kernels.linear import CispoInputs
from tests.algorithm.tokens import summed, tokens
from tests.kernels.cases import CAP, cispo_inputs, largest, relative, truth_of_logits
from tests.sums import sum_error

Ops = Any


@pytest.fixture(params=["compiled", "reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return cispo_reference
    assert load().path is not None, "the library must build where these tests run"
    names = ("row_stats", "row_grads_", "cispo_rows_", "merge_rows", "cispo_terms")
    return SimpleNamespace(**{n: getattr(torch.ops.megatron_rl, n) for n in names})


def logits(C: int, V: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(C, V, generator=torch.Generator().manual_seed(seed)) * 4


def strided(x_CV: torch.Tensor, gap: int) -> torch.Tensor:
    """Copy the numbers with `gap` columns between rows, as in a chunk buffer."""
    out = torch.full((x_CV.shape[0], x_CV.shape[1] + gap), float("nan"))[:, : x_CV.shape[1]]
    return out.copy_(x_CV)


def bf16_of(x_CV: torch.Tensor) -> torch.Tensor:
    """Return the bf16 numbers in the front half of each row."""
    C, V = x_CV.shape
    whole = x_CV.as_strided((C, x_CV.stride(0)), (x_CV.stride(0), 1))
    return whole.view(torch.bfloat16)[:, :V]


def run(
    ops: Ops, x_CV: torch.Tensor, y_C: torch.Tensor, loss: CispoInputs, columns: int, **kw: Any
) -> torch.Tensor:
    scale, inputs = kw.get("scale", 1.0), loss.of(slice(None))
    return ops.cispo_rows_(x_CV, y_C, 0, columns, scale, *inputs, kw.get("bf16", False))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("V", "columns"),
    [(7, 7), (64, 64), (1003, 1000), (4160, 4159), (32000, 31990), (202048, 202048)],
)
def test_log_prob_entropy_ratio_loss_and_gradient_equal_float64(
    ops: Ops, V: int, columns: int, bf16: bool
) -> None:
    C = 11
    x_CV, y_C = logits(C, V), torch.arange(C) * 7919 % columns
    y_C[0], y_C[1] = columns - 1, 0
    loss = cispo_inputs(C, torch.full((C,), -3.0))
    want = truth_of_logits(x_CV, y_C, loss, columns)
    buffer_CV = strided(x_CV, 5)
    logp, entropy, ratio, c, term = run(ops, buffer_CV, y_C, loss, columns, bf16=bf16)
    assert largest(logp, want.logprobs_T) < 4e-6
    assert (logp <= 0).all()
    assert largest(entropy, want.entropy_T) < 4e-6
    assert relative(ratio, want.ratio_T) < 5e-6
    assert relative(c, want.coefficient_T) < 5e-6
    assert want.loss_error(term.double().sum()) < 1e-6
    got = bf16_of(buffer_CV) if bf16 else buffer_CV
    # bf16 numbers have 8 bits: 2^-8 where one element makes up the norm.
    assert relative(got, want.logit_grads_TV) < (4e-3 if bf16 else 1e-6)
    assert (got[:, columns:] == 0).all()
    assert (got[loss.weights_T == 0] == 0).all()


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_shards_merge_to_the_whole_row(ops: Ops, shards: int) -> None:
    C, V = 9, 1003
    width = -(-V // shards) + 3  # a padded tail, and columns that end inside the last shard
    x_CV, y_C = logits(C, V), torch.arange(C) * 331 % V
    loss = cispo_inputs(C, torch.full((C,), -3.0))
    want = truth_of_logits(x_CV, y_C, loss, V)
    padded = torch.full((C, shards * width), 1e6)  # padding must not be looked at
    padded[:, :V] = x_CV
    parts = [strided(padded[:, i * width : (i + 1) * width], 2) for i in range(shards)]
    columns = [min(max(V - i * width, 0), width) for i in range(shards)]
    stats = torch.stack(
        [ops.row_stats(parts[i], y_C, i * width, columns[i], 1.0) for i in range(shards)]
    )
    logp, entropy, top, mass = ops.merge_rows(stats, 1.0)
    terms = ops.cispo_terms(logp.contiguous(), *loss.of(slice(None)))
    assert largest(logp, want.logprobs_T) < 4e-6
    assert largest(entropy, want.entropy_T) < 4e-6
    assert relative(terms[1], want.coefficient_T) < 5e-6
    statistics = (top.contiguous(), mass.contiguous(), terms[1].contiguous())
    for i in range(shards):
        ops.row_grads_(parts[i], y_C, i * width, columns[i], 1.0, *statistics, False)
    got = torch.cat(parts, 1)
    assert relative(got[:, :V], want.logit_grads_TV) < 2e-6
    assert (got[:, V:] == 0).all()


def test_a_shard_without_real_columns_changes_nothing(ops: Ops) -> None:
    x_CV, y_C = logits(4, 50), torch.tensor([3, 49, 0, 20])
    whole = ops.row_stats(x_CV, y_C, 0, 50, 1.0)
    empty = ops.row_stats(torch.full((4, 50), 9e9), y_C, 50, 0, 1.0)
    want = ops.merge_rows(whole[None], 1.0)
    assert torch.equal(ops.merge_rows(torch.stack([whole, empty]), 1.0), want)
    assert torch.equal(ops.merge_rows(torch.stack([empty, whole]), 1.0), want)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_an_offset_of_1e4_costs_nothing(ops: Ops, offset: float) -> None:
    C, V = 8, 1003
    x_CV = logits(C, V) + offset  # rounded to fp32 here; the truth sees the same numbers
    y_C = torch.arange(C)
    loss = cispo_inputs(C, torch.full((C,), -3.0))
    for temperature in (1.0, 0.7):
        want = truth_of_logits(x_CV, y_C, loss, V, temperature)
        buffer_CV = x_CV.clone()
        logp, entropy, *_ = run(ops, buffer_CV, y_C, loss, V, scale=1 / temperature)
        assert (logp <= 0).all()
        assert largest(logp, want.logprobs_T) < 6e-6
        assert largest(entropy, want.entropy_T) < 6e-6
        assert relative(buffer_CV, want.logit_grads_TV) < 2e-6


@pytest.mark.parametrize("temperature", [0.5, 0.7, 2.0])
def test_temperature_scales_distribution_and_gradient(ops: Ops, temperature: float) -> None:
    C, V = 6, 777
    x_CV, y_C = logits(C, V), torch.arange(C)
    loss = cispo_inputs(C, torch.full((C,), -3.0))
    want = truth_of_logits(x_CV, y_C, loss, V, temperature)
    logp, entropy, *_ = run(ops, x_CV, y_C, loss, V, scale=1 / temperature)
    assert largest(logp, want.logprobs_T) < 6e-6
    assert largest(entropy, want.entropy_T) < 6e-6
    assert relative(x_CV, want.logit_grads_TV) < 2e-6


def test_logits_of_minus_infinity_have_no_probability_and_no_gradient(ops: Ops) -> None:
    C, V = 5, 300
    x_CV, y_C = logits(C, V), torch.arange(C)
    x_CV[:, 100:250] = float("-inf")
    loss = cispo_inputs(C, torch.full((C,), -3.0))
    want = truth_of_logits(x_CV, y_C, loss, V)
    logp, entropy, *_ = run(ops, x_CV, y_C, loss, V)
    assert largest(logp, want.logprobs_T) < 4e-6
    assert largest(entropy, want.entropy_T) < 4e-6
    assert (x_CV[:, 100:250] == 0).all()
    assert relative(x_CV, want.logit_grads_TV) < 1e-6


def test_a_masked_or_foreign_target_has_log_prob_minus_infinity_and_no_gradient(ops: Ops) -> None:
    x_CV, y_C = logits(4, 100), torch.tensor([5, -100, 100, 7])
    x_CV[0, 5] = float("-inf")
    loss = CispoInputs(torch.full((4,), -3.0), torch.ones(4), torch.ones(4), CAP)
    logp, _, ratio, c, term = run(ops, x_CV, y_C, loss, 100)
    assert (logp[:3] == float("-inf")).all()
    assert torch.isfinite(logp[3])
    for zero in (ratio, c, term):
        assert (zero[:3] == 0).all()
    assert (x_CV[:3] == 0).all()
    assert x_CV[3].abs().sum() > 0


def test_weight_0_gives_exact_zeros_whatever_else_is_in_the_row(ops: Ops) -> None:
    x_CV, y_C = logits(3, 100), torch.arange(3)
    x_CV[0, 50] = float("nan")
    loss = CispoInputs(torch.tensor([-1.0, float("nan"), -1.0]), torch.ones(3), torch.zeros(3), CAP)
    loss.weights_T[2] = 1.0
    _, _, _, c, term = run(ops, x_CV, y_C, loss, 100)
    assert (c[:2] == 0).all()
    assert (term[:2] == 0).all()
    assert (x_CV[:2] == 0).all()
    assert c[2] != 0


def test_nan_is_not_hidden(ops: Ops) -> None:
    x_CV, y_C = logits(2, 5000), torch.arange(2)
    x_CV[0, 4999] = float("nan")
    loss = CispoInputs(torch.tensor([-1.0, float("nan")]), torch.ones(2), torch.ones(2), CAP)
    logp, _, ratio, c, _ = run(ops, x_CV, y_C, loss, 5000)
    assert torch.isnan(logp[0])
    assert torch.isnan(ratio[1])
    assert torch.isnan(c).all()


def test_the_ratio_is_capped_from_above_alone(ops: Ops) -> None:
    gen = torch.tensor([-30.0, 0.0, float("-inf"), -1.0])
    logp = torch.tensor([-1.0, -9.0, -1.0, -1.0])
    loss = CispoInputs(gen, torch.tensor([2.0, 2.0, -2.0, 2.0]), torch.full((4,), 0.5), CAP)
    ratio, c, term = ops.cispo_terms(logp, *loss.of(slice(None)))
    # -w A min(ratio, 5): 5, e^-9, 5 and 1 times -+1.
    expected = torch.tensor([-5.0, -torch.tensor(-9.0).exp().item(), 5.0, -1.0])
    assert torch.allclose(c, expected, rtol=1e-6)
    assert torch.allclose(term, expected * logp, rtol=1e-6)
    assert ratio[2] == float("inf")


def test_coefficient_and_loss_are_those_of_the_algorithm(ops: Ops) -> None:
    C = 50
    logp = -torch.rand(C) * 4
    loss = cispo_inputs(C, logp)
    columns = (loss.generator_logprobs_T, loss.advantages_T, loss.weights_T)
    given = tokens(logp.tolist(), *(column.tolist() for column in columns))
    want, gradient = summed(Cispo(max_ratio=CAP), given)
    ratio, c, term = ops.cispo_terms(logp, *columns, CAP)
    assert relative(c, torch.tensor(gradient)) < 1e-6
    assert sum_error(term.sum(), want.loss, term.abs().sum()) < 1e-6
    assert ((ratio > CAP) & (loss.weights_T > 0)).sum() == want.clipped
    assert want.clipped > 0


def test_wrong_arguments_are_refused() -> None:
    load()
    ops = torch.ops.megatron_rl
    x_CV, y_C = logits(3, 10), torch.arange(3)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("fp32", lambda: ops.row_stats(x_CV.double(), y_C, 0, 10, 1.0)),
        ("targets", lambda: ops.row_stats(x_CV, y_C[:2], 0, 10, 1.0)),
        ("columns", lambda: ops.row_stats(x_CV, y_C, 0, 11, 1.0)),
        ("scale", lambda: ops.row_stats(x_CV, y_C, 0, 10, 0.0)),
        (
            "advantages",
            lambda: run(ops, x_CV, y_C, CispoInputs(y_C * 1.0, y_C[:1] * 1.0, y_C * 1.0, 5), 10),
        ),
    ]
    for word, call in calls:
        with pytest.raises(RuntimeError, match=word):
            call()
