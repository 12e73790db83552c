"""Task kinds: which verifier judges a completion. Runs inside a worker."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import signal
from collections.abc import Callable
from numbers import Real
from typing import Any

from megatron_rl.rewards.base import Outcome, Verdict, VerifierDown
from megatron_rl.rewards.exact import verify_exact
from megatron_rl.rewards.verifier_settings import VerifierSettings

KINDS = ("exact", "math", "code", "reasoning", "custom")
INLINE = frozenset({"exact"})
"""Kinds that a run judges in its own process: pure string comparisons of microseconds, which cannot
hang, crash or allocate. All others run in the pool's processes."""
Judge = Callable[[str, str, dict[str, Any]], Verdict]
"""(completion, gold, meta) -> verdict."""


def judge_of(kind: str, settings: VerifierSettings) -> Judge:
    """The verifier of a task kind, with its libraries loaded.

    A kind with a colon in it is the import path of a reward function.

    Raises:
        VerifierError: a library, the sandbox or the custom function is missing; with the remedy.
    """
    makers = {
        "exact": _exact,
        "math": _math,
        "code": _code,
        "reasoning": _reasoning,
        "custom": _custom,
    }
    if ":" in kind:
        return _function(load_function(kind))
    if kind not in makers:
        raise VerifierDown(f"task kind {kind!r} is unknown: use one of {', '.join(KINDS)}")
    return makers[kind](settings)


def _exact(settings: VerifierSettings) -> Judge:
    def judge(completion: str, gold: str, meta: dict[str, Any]) -> Verdict:
        return verify_exact(completion, gold, settings.think_end, meta.get("eos", "<eos>"))

    return judge


def _math(settings: VerifierSettings) -> Judge:
    from megatron_rl.rewards.math import stock
    from megatron_rl.rewards.math.verdict import judge as judge_math

    stock.warm_up()
    # The worker's own timer, set anew: what is left of the verdict's time would be too much.
    stock.begin = lambda: signal.setitimer(signal.ITIMER_PROF, settings.math.stock_cpu_seconds)

    def judge(completion: str, gold: str, meta: dict[str, Any]) -> Verdict:
        return judge_math(
            completion,
            gold,
            think_end=settings.think_end,
            boxed=meta.get("boxed", settings.math.boxed),
            ended_thinking=meta.get("ended_thinking", settings.math.ended_thinking),
        )

    return judge


def _code(settings: VerifierSettings) -> Judge:
    from megatron_rl.rewards.code.code_verdict import make_judge

    return make_judge(settings.sandbox, settings.think_end)


def _reasoning(settings: VerifierSettings) -> Judge:
    from megatron_rl.rewards.reasoning_verifier import make_judge

    return make_judge(settings)


def _custom(settings: VerifierSettings) -> Judge:
    if settings.custom is None:
        raise VerifierDown("task kind custom: set verifier.custom to `package.module:function`")
    return _function(load_function(settings.custom))


def _function(function: Callable[..., Any]) -> Judge:
    def judge(completion: str, gold: str, meta: dict[str, Any]) -> Verdict:
        return call_function(function, completion, gold, meta)

    return judge


def load_function(path: str) -> Callable[..., Any]:
    """The reward function at an import path `package.module:function`.

    Its signature is `reward(completion: str, gold: str, meta: dict) -> bool | float | Verdict`,
    `def` or `async def`. A bool is correct or wrong; a number is the reward itself, and correct
    above 0. An exception stops the run.

    Raises:
        VerifierDown: there is no such function.
    """
    module, colon, name = path.partition(":")
    if not colon:
        raise VerifierDown(f"reward function {path!r}: write it as `package.module:function`")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise VerifierDown(f"reward function {path!r}: {e}; is it on PYTHONPATH?") from e
    if not callable(function):
        raise VerifierDown(f"reward function {path!r}: that is no function")
    return function


def call_function(
    function: Callable[..., Any], completion: str, gold: str, meta: dict[str, Any]
) -> Verdict:
    """Verdict of a custom reward function.

    Raises:
        VerifierDown: it raised, or returned neither a bool nor a finite number nor a Verdict.
    """
    try:
        result = function(completion, gold, meta)
        if inspect.isawaitable(result):
            result = asyncio.run(_await(result))
    except MemoryError:
        raise  # a limit of the worker, not a fault of the function
    except Exception as e:
        raise VerifierDown(f"custom reward function: {type(e).__name__}: {e}") from e
    if isinstance(result, Verdict):
        verdict = result
    elif isinstance(result, bool):
        verdict = Verdict(Outcome.CORRECT if result else Outcome.WRONG, f"custom reward: {result}")
    elif isinstance(result, Real):
        reward = float(result)
        outcome = Outcome.CORRECT if reward > 0 else Outcome.WRONG
        verdict = Verdict(outcome, f"custom reward: {reward:g}", reward)
    else:
        raise VerifierDown(
            f"custom reward function: returned {type(result).__name__}, expected bool, float or"
            " Verdict"
        )
    if verdict.reward is not None and not math.isfinite(verdict.reward):
        raise VerifierDown(f"custom reward function: a reward of {verdict.reward}, not finite")
    return verdict


async def _await(result: Any) -> Any:
    return await result
