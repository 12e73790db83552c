import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithm.advantages import token_weights


def counts(*groups):
    return [np.array(g, dtype=np.int64) for g in groups]


def test_prompt_mean_weighs_each_prompt_alike_and_each_of_its_tokens_alike():
    # two prompts of 4 and 10 tokens: 1/(2*4) and 1/(2*10)
    a, b = token_weights(counts([1, 3], [4, 6]), "prompt")
    assert a == pytest.approx([1 / 8, 1 / 8])
    assert b == pytest.approx([1 / 20, 1 / 20])


def test_sample_mean_weighs_each_completion_alike():
    # four completions: 1/(4*tokens)
    a, b = token_weights(counts([1, 3], [4, 6]), "sample")
    assert a == pytest.approx([1 / 4, 1 / 12])
    assert b == pytest.approx([1 / 16, 1 / 24])


def test_token_mean_weighs_every_token_alike():
    a, b = token_weights(counts([1, 3], [4, 6]), "token")
    assert a == pytest.approx([1 / 14] * 2)
    assert b == pytest.approx([1 / 14] * 2)


def test_token_losses_1_and_0_0_0_average_to_a_quarter_over_tokens():
    a, b = token_weights(counts([1], [3]), "token")
    assert a[0] * 1 + b[0] * 0 == 0.25


def test_a_fully_masked_completion_counts_nothing():
    # the mean is over the completions that have tokens: one prompt, one completion of 2 tokens
    for aggregation in ("prompt", "sample", "token"):
        a, b = token_weights(counts([0, 2], [0, 0]), aggregation)
        assert a == pytest.approx([0, 1 / 2])
        assert b.tolist() == [0, 0]


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), max_size=6),
    st.sampled_from(["prompt", "sample", "token"]),
)
def test_weights_times_tokens_sum_to_one(groups, aggregation):
    c = counts(*groups)
    total = sum(float((w * n).sum()) for w, n in zip(token_weights(c, aggregation), c, strict=True))
    assert total == pytest.approx(1.0 if sum(n.sum() for n in c) else 0.0)


def test_constant_length_divides_every_token_by_one_constant():
    # four completions, constant 10: 1/(4*10) for each token, for any lengths
    a, b = token_weights(counts([1, 3], [4, 6]), "constant", 10)
    assert a == pytest.approx([1 / 40] * 2)
    assert b == pytest.approx([1 / 40] * 2)


def test_constant_length_counts_completions_with_tokens_only():
    a, b = token_weights(counts([0, 2], [0, 0]), "constant", 10)
    assert a == pytest.approx([0, 1 / 10])
    assert b.tolist() == [0, 0]
