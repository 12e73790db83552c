"""The other half of `test_math_hacks`, for another worker: a file stays on one."""

from __future__ import annotations

from tests.rewards.test_math_hacks import KINDS, assert_none_passes


def test_no_generated_wrong_answer_passes_for_any_other_gold_answer() -> None:
    assert_none_passes(list(KINDS)[1::2])
