"""Verdicts on answers of competition mathematics.

`verify` may be called from any thread, process or event loop (it blocks): the work is done in a
worker process under hard limits. Inside a pool's worker `judge` is the same without a process.
"""

from __future__ import annotations

from functools import cache

from megatron_rl.rewards.base import Verdict
from megatron_rl.rewards.blocking import BlockingVerifier
from megatron_rl.rewards.math.verdict import judge
from megatron_rl.rewards.verifier_settings import VerifierSettings

__all__ = ["judge", "verify"]


def verify(answer: str, gold: str, *, cpu_seconds: float = 2.0) -> Verdict:
    r"""Whether an answer is the gold answer, and why.

    Args:
        answer: an answer, or a completion: then the last box after thinking is its answer.
        gold: right answer, in LaTeX or plain text.
        cpu_seconds: limit; over it the verdict is `timed_out`.

    Raises:
        VerifierDown: the verifier cannot work; the message has the remedy.

    Example: `verify(r"so \boxed{\frac{2}{4}}", "0.5").passed` is True.
    """
    meta = {"boxed": False, "ended_thinking": False}
    return _worker(cpu_seconds).verify("math", answer, gold, meta)


@cache
def _worker(cpu_seconds: float) -> BlockingVerifier:
    return BlockingVerifier(VerifierSettings(cpu_seconds=cpu_seconds), ("math",))
