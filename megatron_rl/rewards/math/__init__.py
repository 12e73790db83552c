"""Verdicts on answers of competition mathematics.

`verify` blocks and may be called from any thread, process or event loop: a worker process does the
work under hard limits. `math_verdict` is the same in the calling process, without limits.
"""

import atexit
import os
import threading

from megatron_rl.rewards.base import Verdict, VerifierDown
from megatron_rl.rewards.math.verdict import math_verdict
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier_settings import VerifierSettings

__all__ = ["math_verdict", "verify"]

_lock = threading.Lock()
_pools: list[VerifierPool] = []  # the pool of one worker; empty until the first verdict


def verify(answer: str, gold: str) -> Verdict:
    r"""Compare an answer with the gold answer.

    Args:
        answer: an answer, or a completion, whose answer is the last box after thinking.
        gold: right answer, in LaTeX or plain text.

    Raises `VerifierDown`, with the remedy, if the verifier cannot work.

    Example: `verify(r"so \boxed{\frac{2}{4}}", "0.5").passed` is True.
    """
    with _lock:
        if not _pools:
            pool = VerifierPool(VerifierSettings(workers=1), ("math",))
            pool.start()
            _pools.append(pool)
        (pool,) = _pools
    try:
        meta = {"boxed": False, "ended_thinking": False}
        return pool.verify_blocking("math", answer, gold, meta)
    except VerifierDown:
        with _lock:
            pool.close()
            if pool in _pools:
                _pools.remove(pool)  # the next verdict starts another one
        raise


def _forget() -> None:
    """Drop the parent's workers after a fork, and a lock that one of its threads may hold."""
    global _lock
    _lock = threading.Lock()
    for pool in _pools:
        for worker in pool.workers:
            worker.forget()
    _pools.clear()


@atexit.register
def _close() -> None:
    for pool in _pools:
        pool.close()


os.register_at_fork(after_in_child=_forget)
