"""Task kind `code`: the last code block after thinking must pass every test."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from megatron_rl.rewards.base import Outcome, Verdict, VerifierDown
from megatron_rl.rewards.code import isolation
from megatron_rl.rewards.code.cases import BadTests, Case, failure, read_cases
from megatron_rl.rewards.code.sandbox import run_tests
from megatron_rl.rewards.verifier_settings import SandboxSettings

_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
MAX_SOURCE = 256 * 1024


def extract_code(completion: str, think_end: str) -> tuple[str | None, str]:
    """(program, reason): the last closed code block after thinking, or why there is none."""
    head, ended, tail = completion.partition(think_end)
    if not ended and think_end.replace("/", "") in completion:
        return None, "thinking did not end"
    text = tail if ended else head
    blocks = _BLOCK.findall(text)
    if not blocks:
        return None, "no closed ```python block"
    source = str(blocks[-1])
    if len(source) > MAX_SOURCE:
        return None, f"a program of {len(source)} characters: over the limit of {MAX_SOURCE}"
    return (source, "") if source.strip() else (None, "the last code block is empty")


def make_judge(
    settings: SandboxSettings, think_end: str
) -> Callable[[str, str, dict[str, Any]], Verdict]:
    """The verifier of programs.

    Raises:
        SandboxUnavailable: the host has not the isolation that is asked for.
    """
    isolation.require(settings)

    def judge(completion: str, gold: str, meta: dict[str, Any]) -> Verdict:
        source, reason = extract_code(completion, think_end)
        if source is None:
            return Verdict(Outcome.NO_ANSWER, reason)
        try:
            cases = read_cases(gold, function_name(meta))
        except BadTests as e:
            raise VerifierDown(f"tests of a programming problem: {e}; check the data set") from e
        return verdict_on(source, _chosen(cases, settings.max_tests), settings)

    return judge


def function_name(meta: dict[str, Any]) -> str | None:
    """Name of the function that the tests call: `fn_name`, or in LiveCodeBench's `metadata`."""
    metadata = meta.get("metadata") or {}
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            metadata = {}
    name = meta.get("fn_name") or metadata.get("func_name")
    return str(name) if name else None


def _chosen(cases: list[Case], most: int) -> list[Case]:
    if not most or len(cases) <= most:
        return cases
    size = {id(c): len(str(c.run)) for c in cases}
    return sorted(cases, key=lambda c: -size[id(c)])[:most]


def verdict_on(source: str, cases: list[Case], settings: SandboxSettings) -> Verdict:
    """Run the tests up to the first that fails."""
    try:
        compile(source, "program.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        return Verdict(Outcome.WRONG, f"the program does not compile: {e}")
    verdict = _run(source, cases, settings)
    if verdict is None:
        # The sandbox died under the program. Again, and the program is to blame, if others run.
        verdict = _run(source, cases, settings)
    if verdict is not None:
        return verdict
    check = next(run_tests("print(1)", [{"stdin": ""}], settings))
    if check.status != "ok":
        raise VerifierDown(f"the sandbox runs no program any more: {check.status} {check.error}")
    return Verdict(Outcome.WRONG, "the program ended its sandbox")


def _run(source: str, cases: list[Case], settings: SandboxSettings) -> Verdict | None:
    """The verdict of one run; None if the sandbox ended before the program did."""
    results = run_tests(source, [c.run for c in cases], settings)
    try:
        for number, (case, result) in enumerate(zip(cases, results, strict=False), start=1):
            if result.status == "killed":
                return None
            problem = failure(case, result)
            if problem:
                return Verdict(Outcome.WRONG, f"test {number} of {len(cases)}: {problem}")
    finally:
        results.close()  # type: ignore[attr-defined]
    return Verdict(Outcome.CORRECT, f"passed {len(cases)} tests")
