"""Rewards of outcomes by default; unknown settings are rejected."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from megatron_rl.rewards.base import Outcome, Verdict
from megatron_rl.rewards.verifier_settings import RewardValues, VerifierSettings


def test_correct_traces_have_plus_one_and_all_others_minus_one_by_default() -> None:
    values = RewardValues()
    got = {outcome: values.of(Verdict(outcome, "")) for outcome in Outcome}
    assert got.pop(Outcome.CORRECT) == 1.0
    assert got.pop(Outcome.TIMED_OUT) is None  # the verifier's failure, not the completion's
    assert set(got.values()) == {-1.0}
    assert RewardValues(no_answer=None).of(Verdict(Outcome.NO_ANSWER, "")) is None


def test_unknown_keys_and_bad_values_are_refused() -> None:
    with pytest.raises(ValidationError, match="wrokers"):
        VerifierSettings.model_validate({"wrokers": 2})
    with pytest.raises(ValidationError, match="isolation"):
        VerifierSettings.model_validate({"sandbox": {"isolation": "none"}})


def test_rewards_import_without_their_heavy_libraries() -> None:
    code = (
        "import sys, megatron_rl.rewards, megatron_rl.rewards.pool\n"
        "import megatron_rl.rewards.verifier_settings\n"
        "heavy = {'math_verify', 'sympy', 'reasoning_gym', 'torch', 'datasets', 'pyseccomp'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
