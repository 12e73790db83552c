"""Verifiers: from a completion to a verdict."""

from megatron_rl.rewards.base import (
    Outcome,
    SandboxUnavailable,
    Verdict,
    VerifierDown,
    VerifierError,
)
from megatron_rl.rewards.exact import verify_exact

__all__ = [
    "Outcome",
    "SandboxUnavailable",
    "Verdict",
    "VerifierDown",
    "VerifierError",
    "verify_exact",
]
