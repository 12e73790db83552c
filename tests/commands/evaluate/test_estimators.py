"""mean@n, pass@k, majority@n equal values that were computed by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.commands.evaluate.estimators import (
    by_difficulty,
    estimates,
    majority_at_n,
    mean_at_n,
    pass_at_k,
)

# Four prompts, four samples each; right: 4, 2, 1, 0.
PASSED = np.array(
    [
        [True, True, True, True],
        [True, True, False, False],
        [False, True, False, False],
        [False, False, False, False],
    ]
)
ANSWERS = np.array(
    [
        ["5", "5", "5", "5"],  # 5 is right
        ["7", "7", "8", "8"],  # 7 is right: a tie, 1/2
        ["1", "3", "1", "2"],  # 3 is right, 1 wins: 0
        ["9", None, None, "9"],  # nothing right: 0
    ],
    dtype=object,
)


def test_mean_at_n() -> None:
    estimate = mean_at_n(PASSED)
    # (1 + 1/2 + 1/4 + 0) / 4 = 7/16
    assert estimate["value"] == 0.4375
    # squared deviations: .5625^2 + .0625^2 + .1875^2 + .4375^2 = .546875; / 3 / 4, root
    assert estimate["standard_error"] == pytest.approx(math.sqrt(0.546875 / 3 / 4), rel=1e-12)


def test_pass_at_k() -> None:
    # k=2, n=4: c=4: 1; c=2: 1 - C(2,2)/C(4,2) = 5/6; c=1: 1 - C(3,2)/C(4,2) = 1/2; c=0: 0
    assert pass_at_k(PASSED, 2)["value"] == pytest.approx((1 + 5 / 6 + 1 / 2) / 4, rel=1e-12)
    assert pass_at_k(PASSED, 1)["value"] == mean_at_n(PASSED)["value"]
    # k=4: at least one right among all
    assert pass_at_k(PASSED, 4)["value"] == 0.75
    for k in (0, 5):
        with pytest.raises(ValueError, match=r"1\.\.4"):
            pass_at_k(PASSED, k)


def test_majority_at_n() -> None:
    estimate = majority_at_n(ANSWERS, PASSED)
    # (1 + 1/2 + 0 + 0) / 4
    assert estimate["value"] == 0.375
    # squared deviations: .625^2 + .125^2 + 2 * .375^2 = .6875
    assert estimate["standard_error"] == pytest.approx(math.sqrt(0.6875 / 3 / 4), rel=1e-12)
    with pytest.raises(ValueError):
        majority_at_n(ANSWERS[:2], PASSED)


def test_a_prompt_without_votes_counts_nothing() -> None:
    nothing = np.full((1, 2), None, dtype=object)
    assert majority_at_n(nothing, np.zeros((1, 2), dtype=bool))["value"] == 0.0


def test_one_prompt_has_no_standard_error() -> None:
    assert mean_at_n(np.array([[True, False]]))["standard_error"] is None


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_mean_over_all_draws_of_k(
    samples: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(samples)))
    draws = [any(draw) for draw in itertools.combinations(samples, k)]
    estimate = pass_at_k(np.array([samples]), k)
    assert estimate["value"] == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_estimates_have_pass_at_k_for_powers_of_two_and_for_all_samples() -> None:
    for n, ks in ((1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])):
        row = estimates(np.ones((2, n), dtype=bool), None)
        assert list(row["pass_at_k"]) == [str(k) for k in ks]
        assert row["majority_at_n"] is None and row["num_prompts"] == 2


def test_difficulties_are_in_the_order_of_their_numbers_and_one_alone_has_no_table() -> None:
    rows = by_difficulty(["Level 10", "Level 2", "Level 2", "easy"], PASSED, ANSWERS)
    assert [(r["difficulty"], r["num_prompts"]) for r in rows] == [
        ("Level 2", 2),
        ("Level 10", 1),
        ("easy", 1),
    ]
    assert [r["mean_at_n"]["value"] for r in rows] == [0.375, 1.0, 0.0]
    assert rows[0]["pass_at_k"]["2"]["value"] == pytest.approx((5 / 6 + 1 / 2) / 2, rel=1e-12)
    assert [r["majority_at_n"]["value"] for r in rows] == [0.25, 1.0, 0.0]
    assert by_difficulty(["easy"] * 4, PASSED, ANSWERS) == []
