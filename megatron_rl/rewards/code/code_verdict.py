"""Task kind `code`: the last code block after thinking must pass every test."""

import re
from contextlib import closing
from typing import Any

from megatron_rl.rewards.base import Outcome, Verdict, Verifier, VerifierDown
from megatron_rl.rewards.code import isolation
from megatron_rl.rewards.code.cases import BadTests, Case, failure, parsed, read_cases
from megatron_rl.rewards.code.sandbox import run_tests
from megatron_rl.rewards.verifier_settings import SandboxSettings

_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
MAX_SOURCE = 256 * 1024


def extract_code(completion: str, think_end: str) -> tuple[str | None, str]:
    """Return the last closed code block after thinking, or None and the reason."""
    head, ended, tail = completion.partition(think_end)
    if not ended and think_end.replace("/", "") in completion:
        return None, "thinking did not end"
    blocks = _BLOCK.findall(tail if ended else head)
    if not blocks:
        return None, "no closed ```python block"
    source = str(blocks[-1])
    if len(source) > MAX_SOURCE:
        return None, f"a program of {len(source)} characters: over the limit of {MAX_SOURCE}"
    return (source, "") if source.strip() else (None, "the last code block is empty")


def make_code_verifier(settings: SandboxSettings, think_end: str) -> Verifier:
    """Return the verifier of programs; `SandboxUnavailable` if the host lacks the isolation."""
    isolation.require(settings)

    def verify(completion: str, gold: str, meta: dict[str, Any]) -> Verdict:
        source, reason = extract_code(completion, think_end)
        if source is None:
            return Verdict(Outcome.NO_ANSWER, reason)
        try:
            cases = read_cases(gold, function_name(meta))
        except BadTests as e:
            raise VerifierDown(f"tests of a programming problem: {e}; check the data set") from e
        if 0 < settings.max_tests < len(cases):
            cases = sorted(cases, key=lambda c: len(str(c.run)), reverse=True)[: settings.max_tests]
        return verify_program(source, cases, settings)

    return verify


def function_name(meta: dict[str, Any]) -> str | None:
    """Return the function that the tests call: `fn_name`, or in LiveCodeBench's `metadata`."""
    metadata = parsed(meta.get("metadata"))
    name = meta.get("fn_name") or (isinstance(metadata, dict) and metadata.get("func_name"))
    return str(name) if name else None


def verify_program(source: str, cases: list[Case], settings: SandboxSettings) -> Verdict:
    """Run the tests up to the first that fails."""
    try:
        compile(source, "program.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        return Verdict(Outcome.WRONG, f"the program does not compile: {e}")
    # The sandbox may die. Retry once; if it dies again while other programs run, fail this one.
    if verdict := _run(source, cases, settings) or _run(source, cases, settings):
        return verdict
    check = next(run_tests("print(1)", [{"stdin": ""}], settings))
    if check.status != "ok":
        raise VerifierDown(f"the sandbox cannot run any program: {check.status} {check.error}")
    return Verdict(Outcome.WRONG, "the program ended its sandbox")


def _run(source: str, cases: list[Case], settings: SandboxSettings) -> Verdict | None:
    """Return the verdict of one run; None if the sandbox ended before the program did."""
    with closing(run_tests(source, [c.run for c in cases], settings)) as results:
        for number, (case, result) in enumerate(zip(cases, results, strict=False), start=1):
            if result.status == "killed":
                return None
            if problem := failure(case, result):
                return Verdict(Outcome.WRONG, f"test {number} of {len(cases)}: {problem}")
    return Verdict(Outcome.CORRECT, f"passed {len(cases)} tests")
