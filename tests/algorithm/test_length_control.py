from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.algorithm.advantages import length_penalty, thinking_budgets
from megatron_rl.config import load_config

TINY = Path(__file__).parents[2] / "examples" / "scalerl_tiny.yaml"


def test_the_penalty_falls_from_0_to_minus_1_over_the_cache():
    # clip((100 - n) / 20 - 1, -1, 0)
    found = length_penalty(np.array([1, 80, 90, 95, 100, 120]), 100, 20)
    assert found == pytest.approx([0, 0, -0.5, -0.75, -1, -1])


def test_scalerls_penalty_begins_after_the_thinking_budget():
    # A.10: L_max 14k, L_cache 2k; at 13,000 tokens (14,336 - 13,000) / 2,048 - 1
    a = load_config(None, ["--recipe", "scalerl-loo-length-penalty"]).algorithm
    found = length_penalty(np.array([12288, 12289, 13000, 14336]), *_lengths(a))
    assert found == pytest.approx([0, -1 / 2048, 1336 / 2048 - 1, -1])
    assert found[2] == pytest.approx(-0.35, abs=0.005)
    # The tiny example has lengths of its own: a seventh of its longest completion.
    tiny = load_config(TINY, ["--recipe", "scalerl-loo-length-penalty"]).algorithm
    assert (tiny.length_penalty, *_lengths(tiny)) == ("right", 34, 4)


def _lengths(algorithm):
    return algorithm.length_max_tokens, algorithm.length_cache_tokens


def test_it_is_dapos_soft_over_long_punishment():
    # DAPO, equation 13, with L_max 20,480 and L_cache 4,096
    longest, cache = 20480, 4096

    def dapo(n):
        if n <= longest - cache:
            return 0.0
        return ((longest - cache) - n) / cache if n <= longest else -1.0

    lengths = np.arange(15000, 22000, 37)
    assert length_penalty(lengths, longest, cache) == pytest.approx([dapo(n) for n in lengths])


def test_thinking_budgets_are_uniform_in_the_range_and_the_same_for_a_group_made_again():
    drawn = Counter(b for g in range(500) for b in thinking_budgets(1, g, 8, (10, 13)))
    assert set(drawn) == {10, 11, 12, 13}
    assert min(drawn.values()) > 850
    assert thinking_budgets(1, 4, 8, (10, 13)) == thinking_budgets(1, 4, 8, (10, 13))
    assert thinking_budgets(1, 4, 8, (10, 99)) != thinking_budgets(1, 5, 8, (10, 99))
