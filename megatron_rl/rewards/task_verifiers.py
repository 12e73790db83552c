"""Task kinds and their verifiers; runs inside a worker."""

import asyncio
import inspect
import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

from megatron_rl.import_path import imported
from megatron_rl.rewards.base import Outcome, Verdict, Verifier, VerifierDown
from megatron_rl.rewards.verifier_settings import VerifierSettings

KINDS = ("exact", "math", "code", "reasoning", "custom")
INLINE = frozenset({"exact"})
"""Kinds that a run verifies in its own process: string comparisons of microseconds, which cannot
hang, crash or allocate. All others run in the pool's processes."""
BOX = "\\boxed{"


def make_verifier(kind: str, settings: VerifierSettings) -> Verifier:
    """Return the verifier of a task kind, or of a reward function at an import path with a colon.

    Raises `VerifierError`, with the remedy, if a library, the sandbox or the function is missing.
    """
    path = settings.custom if kind == "custom" else kind
    if path is None:
        raise VerifierDown("task kind custom: set verifier.custom to `package.module:function`")
    if kind == "custom" or ":" in kind:
        try:
            return partial(call_function, imported(path))
        except ValueError as e:
            raise VerifierDown(f"reward function {e}") from e
    if kind == "exact":
        return lambda completion, gold, meta: verify_exact(
            completion, gold, settings.think_end, meta.get("eos", "<eos>")
        )
    if kind == "math":
        from megatron_rl.rewards.math import stock
        from megatron_rl.rewards.math.verdict import math_verdict

        stock.warm_up()
        return lambda completion, gold, meta: math_verdict(
            completion,
            gold,
            think_end=settings.think_end,
            boxed=meta.get("boxed", settings.math.boxed),
            ended_thinking=meta.get("ended_thinking", settings.math.ended_thinking),
        )
    if kind == "code":
        from megatron_rl.rewards.code.code_verdict import make_code_verifier

        return make_code_verifier(settings.sandbox, settings.think_end)
    if kind == "reasoning":
        from megatron_rl.rewards.reasoning_verifier import make_reasoning_verifier

        return make_reasoning_verifier(settings)
    raise VerifierDown(f"unknown task kind {kind!r}: use one of {', '.join(KINDS)}")


def verify_exact(
    completion: str, answer: str, think_end: str = "</think>", eos: str = "<eos>"
) -> Verdict:
    r"""Check that a completion's text after thinking is `\boxed{answer}` and nothing else.

    The completion has its special tokens: the first `think_end` closes thinking, `eos` must follow
    the box.
    """
    _, ended, tail = completion.partition(think_end)
    if not ended:
        return Verdict(Outcome.NO_ANSWER, "thinking did not end")
    if not tail.startswith(BOX):
        return Verdict(Outcome.NO_ANSWER, f"no {BOX}...}} right after {think_end}")
    inside, closed, rest = tail[len(BOX) :].partition("}")
    if not closed or rest != eos:
        return Verdict(Outcome.NO_ANSWER, "the box is not closed, or text follows it")
    if inside != answer:
        return Verdict(Outcome.WRONG, f"{inside} is not {answer}")
    return Verdict(Outcome.CORRECT, f"{inside} is the answer")


def call_function(
    function: Callable[..., Any], completion: str, gold: str, meta: dict[str, Any]
) -> Verdict:
    """Return the verdict of a custom reward function; `VerifierDown` if it fails.

    Its signature is `reward(completion: str, gold: str, meta: dict) -> bool | float | Verdict`,
    `def` or `async def`. A bool is correct or wrong; a number is the reward itself, and correct
    above 0. An exception stops the run.
    """
    try:
        result = function(completion, gold, meta)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except MemoryError:
        raise  # a limit of the worker, not a fault of the function
    except Exception as e:
        raise VerifierDown(f"custom reward function: {type(e).__name__}: {e}") from e
    if isinstance(result, Verdict):
        verdict = result
    elif isinstance(result, bool):
        verdict = Verdict(Outcome.CORRECT if result else Outcome.WRONG, f"custom reward: {result}")
    elif isinstance(result, Real):
        outcome = Outcome.CORRECT if (reward := float(result)) > 0 else Outcome.WRONG
        verdict = Verdict(outcome, f"custom reward: {reward:g}", reward)
    else:
        raise VerifierDown(
            f"custom reward function: returned {type(result).__name__}, expected bool, float or"
            " Verdict"
        )
    if verdict.reward is not None and not math.isfinite(verdict.reward):
        raise VerifierDown(f"custom reward function: the reward {verdict.reward} is not finite")
    return verdict
