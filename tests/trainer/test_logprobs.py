"""Vocabulary-parallel log-probs and entropy against float64, with hostile logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.kernels.ops import fp32_linear
from megatron_rl.trainer.loss import vocabulary_parallel_logprobs


class OneRank:
    """The edge: a process group of one (several are in test_layouts)."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


GROUP: dist.ProcessGroup = OneRank()  # type: ignore[assignment]


def reference(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    all_T = torch.log_softmax(logits.double() / temperature, -1)
    return all_T.gather(1, targets[:, None])[:, 0], -(all_T.exp() * all_T).sum(-1)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocabulary", [37, 40])
def test_values_and_gradients_equal_float64(
    offset: float, temperature: float, vocabulary: int
) -> None:
    rng = torch.Generator().manual_seed(1)
    base = torch.randn(9, vocabulary, generator=rng) * 4
    targets = torch.randint(0, vocabulary, (9,), generator=rng)
    # Columns beyond the vocabulary are padding of tensor parallelism: large on purpose.
    padded = torch.nn.functional.pad(base + offset, (0, 40 - vocabulary), value=offset + 50.0)
    logits = padded.clone().requires_grad_()
    logprobs, entropy = vocabulary_parallel_logprobs(
        logits, targets, temperature, vocabulary, GROUP
    )
    exact = (padded[:, :vocabulary]).double().requires_grad_()
    want, want_entropy = reference(exact, targets, temperature)
    assert (logprobs <= 0).all()
    torch.testing.assert_close(logprobs.double(), want, atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=2e-5, rtol=1e-6)
    assert not entropy.requires_grad

    weights = torch.randn(9, generator=rng)
    (logprobs * weights).sum().backward()
    (want * weights).sum().backward()
    got = logits.grad[:, :vocabulary].double()
    torch.testing.assert_close(got, exact.grad, atol=1e-6, rtol=1e-4)
    assert (logits.grad[:, vocabulary:] == 0).all()
    assert torch.equal(logits.detach(), padded)  # the caller's logits are left alone


def test_entropy_is_that_of_the_distribution() -> None:
    # Uniform over 4 tokens: ln 4, whichever token was sampled.
    _, entropy = vocabulary_parallel_logprobs(torch.zeros(4, 4), torch.arange(4), 1.0, 4, GROUP)
    torch.testing.assert_close(entropy, torch.full((4,), 4.0).log())


def test_no_rows_give_no_values_and_a_zero_gradient() -> None:
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(7, 8, requires_grad=True)
    rows = hidden.index_select(0, torch.zeros(0, dtype=torch.long))
    logits = fp32_linear(rows, weight)
    logprobs, entropy = vocabulary_parallel_logprobs(
        logits, torch.zeros(0, dtype=torch.long), 1.0, 7, GROUP
    )
    logprobs.sum().backward()
    assert len(logprobs) == len(entropy) == 0
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp32_head_is_exact_in_its_operands(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 64, generator=rng).to(dtype).requires_grad_()
    weight = torch.randn(19, 64, generator=rng).to(dtype).requires_grad_()
    logits = fp32_linear(hidden, weight)
    assert logits.dtype == torch.float32
    exact = hidden.detach().double() @ weight.detach().double().t()
    torch.testing.assert_close(logits.double(), exact, atol=1e-4, rtol=1e-6)

    upstream = torch.randn(11, 19, generator=rng)
    logits.backward(upstream)
    want = upstream.double() @ weight.detach().double()
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    tolerance = {"atol": 0.05, "rtol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(
        hidden.grad.double(), want, **(tolerance or {"atol": 1e-4, "rtol": 1e-5})
    )
