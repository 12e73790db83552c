from collections import Counter

import numpy as np
import pytest

from megatron_rl.algorithm.length_control import length_penalty, thinking_budgets


def test_the_penalty_falls_from_0_to_minus_1_over_the_cache():
    # clip((100 - n) / 20 - 1, -1, 0)
    found = length_penalty(np.array([1, 80, 90, 95, 100, 120]), 100, 20)
    assert found == pytest.approx([0, 0, -0.5, -0.75, -1, -1])


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
