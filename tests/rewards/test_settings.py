"""Rewards of outcomes by default; unknown settings are rejected."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from megatron_rl.rewards.base import Outcome
from megatron_rl.rewards.verifier_settings import RewardValues, VerifierSettings


def test_only_correct_and_wrong_are_rewards_by_default() -> None:
    values = RewardValues()
    got = {outcome: getattr(values, outcome.value) for outcome in Outcome}
    assert {o for o, v in got.items() if v is not None} == {Outcome.CORRECT, Outcome.WRONG}
    assert (got[Outcome.CORRECT], got[Outcome.WRONG]) == (1.0, -1.0)
    assert RewardValues(no_answer=-1.0).no_answer == -1.0


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
