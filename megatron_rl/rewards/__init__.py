"""Verifiers: from a completion to a verdict."""

from megatron_rl.rewards.base import Outcome, Verdict, VerifierDown, VerifierError
from megatron_rl.rewards.task_verifiers import verify_exact

__all__ = ["Outcome", "Verdict", "VerifierDown", "VerifierError", "verify_exact"]
