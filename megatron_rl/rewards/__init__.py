"""Verifiers: from a completion to a verdict."""

from megatron_rl.rewards.base import Outcome, Verdict
from megatron_rl.rewards.exact import verify_exact

__all__ = ["Outcome", "Verdict", "verify_exact"]
