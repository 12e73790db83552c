"""mean@n, pass@k, majority@n equal values that were computed by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.commands.evaluate import by_difficulty, majority_at_n, mean_at_n, pass_at_k

# Four prompts, four samples each; right: 4, 2, 1, 0.
PASSED = [
    [True, True, True, True],
    [True, True, False, False],
    [False, True, False, False],
    [False, False, False, False],
]
ANSWERS = [
    ["5", "5", "5", "5"],  # 5 is right
    ["7", "7", "8", "8"],  # 7 is right: a tie, 1/2
    ["1", "3", "1", "2"],  # 3 is right, 1 wins: 0
    ["9", None, None, "9"],  # nothing right: 0
]


def test_mean_at_n() -> None:
    estimate = mean_at_n(PASSED)
    # (1 + 1/2 + 1/4 + 0) / 4 = 7/16
    assert estimate.value == 0.4375
    # squared deviations: .5625^2 + .0625^2 + .1875^2 + .4375^2 = .546875; / 3 / 4, root
    assert estimate.standard_error == pytest.approx(math.sqrt(0.546875 / 3 / 4), rel=1e-12)
    assert estimate.prompts == 4


def test_pass_at_k() -> None:
    # k=2, n=4: c=4: 1; c=2: 1 - C(2,2)/C(4,2) = 5/6; c=1: 1 - C(3,2)/C(4,2) = 1/2; c=0: 0
    assert pass_at_k(PASSED, 2).value == pytest.approx((1 + 5 / 6 + 1 / 2) / 4, rel=1e-12)
    assert pass_at_k(PASSED, 1).value == mean_at_n(PASSED).value
    # k=4: at least one right among all
    assert pass_at_k(PASSED, 4).value == 0.75


def test_majority_at_n() -> None:
    estimate = majority_at_n(ANSWERS, PASSED)
    # (1 + 1/2 + 0 + 0) / 4
    assert estimate.value == 0.375
    # squared deviations: .625^2 + .125^2 + 2 * .375^2 = .6875
    assert estimate.standard_error == pytest.approx(math.sqrt(0.6875 / 3 / 4), rel=1e-12)


def test_a_prompt_without_votes_counts_nothing() -> None:
    assert majority_at_n([[None, None]], [[False, False]]).value == 0.0


def test_one_prompt_has_no_standard_error() -> None:
    assert mean_at_n([[True, False]]).standard_error is None


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_mean_over_all_draws_of_k(
    samples: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(samples)))
    draws = [any(draw) for draw in itertools.combinations(samples, k)]
    assert pass_at_k([samples], k).value == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_the_table_by_difficulty_has_levels_in_order_and_all_at_the_end() -> None:
    rows = by_difficulty(
        ["Level 10", "Level 2", "Level 2", "easy"], PASSED, ks=(1, 2), answers=ANSWERS
    )
    assert [(r.difficulty, r.prompts) for r in rows] == [
        ("Level 2", 2),
        ("Level 10", 1),
        ("easy", 1),
        ("all", 4),
    ]
    assert [r.mean.value for r in rows] == [0.375, 1.0, 0.0, 0.4375]
    assert rows[0].passed[2].value == pytest.approx((5 / 6 + 1 / 2) / 2, rel=1e-12)
    majorities = [r.majority.value for r in rows if r.majority is not None]
    assert majorities == [0.25, 1.0, 0.0, 0.375]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_at_n([]), "at least one prompt"),
        (lambda: mean_at_n([[]]), "one sample"),
        (lambda: pass_at_k(PASSED, 5), r"1\.\.4"),
        (lambda: pass_at_k(PASSED, 0), r"1\.\.4"),
        (lambda: majority_at_n(ANSWERS[:2], PASSED), "different shapes"),
        (lambda: by_difficulty(["a"], PASSED), "1 difficulties of 4"),
    ],
)
def test_what_cannot_be_estimated_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
