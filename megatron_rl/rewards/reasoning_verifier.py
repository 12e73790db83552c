"""Task kind `reasoning`: reasoning-gym's own scorers, behind a gate.

Some of its scorers pass the answer to `eval` or to sympy's `parse_expr`, which run code. For those
tasks an answer that could call anything is unparsable.
"""

import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from megatron_rl.rewards.base import Outcome, Verdict, Verifier, VerifierDown
from megatron_rl.rewards.math.extract import NoAnswer, after_thinking, last_box
from megatron_rl.rewards.math.normalize import untext
from megatron_rl.rewards.math.verdict import shorten
from megatron_rl.rewards.verifier_settings import VerifierSettings

MAX_ANSWER = 10_000
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARITHMETIC = re.compile(r"(?:(?!\*\*)[\d\s+\-*/().])*")
_LITERAL = re.compile(r"(?:(?!__)[\w\s,.'\"\[\]\-])*")
_FORMULA = re.compile(r"(?:(?!__)[\w\s+\-*/^().,])*")
_FORMULA_NAMES = """
sin cos tan cot sec csc asin acos atan arcsin arccos arctan sinh cosh tanh exp log ln sqrt pi E Abs
"""
_GATES = {
    **dict.fromkeys(("countdown", "puzzle24"), _ARITHMETIC),
    **dict.fromkeys(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"), _LITERAL),
    **dict.fromkeys(("simple_integration", "intermediate_integration"), _FORMULA),
    "polynomial_multiplication": _FORMULA,
}

_COMMANDS = {
    **{escaped: escaped[1] for escaped in ("\\_", "\\{", "\\}", "\\%")},
    **dict.fromkeys(("\\times", "\\cdot"), "*"),
    "\\div": "/",
    **dict.fromkeys(("\\le", "\\leq"), "<="),
    **dict.fromkeys(("\\ge", "\\geq"), ">="),
    **dict.fromkeys(("\\ne", "\\neq"), "!="),
    **dict.fromkeys(("\\left", "\\right", "$"), ""),
    **dict.fromkeys(("\\,", "\\ ", "\\quad"), " "),
}


def plain(answer: str, gold: str) -> str:
    r"""Return an answer as scorers read it, for `\text{Tuesday}`, `11 \times 23`, `x=-4`."""
    text = re.sub(r"\\d?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", untext(answer))
    text = re.sub(r"\\[A-Za-z]+|\\.|\$", lambda m: _COMMANDS.get(m[0], m[0]), text)
    if "=" not in gold:
        text = re.sub(r"^\s*[A-Za-z]\w?\s*=", "", text)
    for sign, own in (("*", "×"), ("/", "÷"), ("-", "−")):
        text = text.replace(sign, own) if own in gold else text
    return text.strip()


def is_safe(task: str, answer: str) -> bool:
    """Return True if an answer may be passed to the task's scorer."""
    if (gate := _GATES.get(task)) is None:
        return True
    names = re.findall(r"[^\W\d_]\w+", answer) if gate is _FORMULA else ()
    return gate.fullmatch(answer) is not None and set(names) <= set(_FORMULA_NAMES.split())


def score_function(task: str) -> Callable[[str, dict[str, Any]], float]:
    """Return reasoning-gym's scorer of a task; `VerifierDown` if it is missing."""
    if task == "codeio":
        raise VerifierDown("reasoning task 'codeio': its entries run code outside the sandbox")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym import get_score_answer_fn
    except ImportError as e:
        raise VerifierDown(f"reasoning-gym is missing ({e}): install megatron_rl[rewards]") from e
    try:
        return get_score_answer_fn(task)
    except ValueError as e:
        raise VerifierDown(f"reasoning task {task!r}: {e}") from e


def make_reasoning_verifier(settings: VerifierSettings) -> Verifier:
    """Return the verifier; `meta` has the task's name and entry (see `data.reasoning`)."""
    score_function("chain_sum")  # fails without the library
    scorer_of = cache(score_function)

    def verify(completion: str, gold: str, meta: dict[str, Any]) -> Verdict:
        task = str(meta["dataset"])
        required = meta.get("ended_thinking", settings.math.ended_thinking)
        try:
            answer = _answer(after_thinking(completion, settings.think_end, required=required))
        except NoAnswer as e:
            return Verdict(Outcome.NO_ANSWER, str(e))
        if len(answer) > MAX_ANSWER:
            return Verdict(Outcome.UNPARSABLE, f"an answer of {len(answer)} characters")
        first = scored(task, answer, gold, meta)
        if first.passed or (without := plain(answer, gold)) == answer:
            return first
        second = scored(task, without, gold, meta)
        return second if second.passed else first

    def scored(task: str, answer: str, gold: str, meta: dict[str, Any]) -> Verdict:
        if answer == gold:
            return Verdict(Outcome.CORRECT, f"{shorten(answer)} is the answer")
        if not is_safe(task, answer):
            reason = f"{shorten(answer)} has a form that could run code in {task}'s scorer"
            return Verdict(Outcome.UNPARSABLE, reason)
        try:
            score = float(scorer_of(task)(answer, meta["entry"]))
        except (MemoryError, VerifierDown):
            raise
        except Exception as e:  # noqa: BLE001 - scorers raise anything on malformed answers
            return Verdict(Outcome.UNPARSABLE, f"{task}'s scorer: {type(e).__name__}: {e}")
        outcome = Outcome.CORRECT if score >= 1.0 else Outcome.WRONG
        return Verdict(outcome, f"{task} scores {shorten(answer)} {score:g}")

    return verify


def _answer(text: str) -> str:
    if (boxed := last_box(text)) is not None:
        return boxed.strip()
    if not (tags := _TAG.findall(text)):
        raise NoAnswer("no \\boxed{...} and no <answer> in the answer")
    return str(tags[-1]).strip()
