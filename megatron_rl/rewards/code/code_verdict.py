"""Task kind `code`: the last Python block after thinking must pass every test."""

import re
import textwrap
from collections.abc import Iterator
from contextlib import closing
from heapq import nlargest
from typing import Any

from megatron_rl.rewards.base import Outcome, Verdict, Verifier, VerifierDown
from megatron_rl.rewards.code import isolation
from megatron_rl.rewards.code.cases import (
    BadTests,
    Case,
    failure,
    giant_integers,
    parsed,
    read_cases,
)
from megatron_rl.rewards.code.sandbox import run_tests
from megatron_rl.rewards.math.extract import NoAnswer, after_thinking
from megatron_rl.rewards.verifier_settings import SandboxSettings

_OPENING = re.compile(r"([^`]*?)(`{3,}|(?<![^\s>])~{3,})[ \t]*([^`\n]*)")
_PYTHON = re.compile(r"\{?\.?(i?python|py(py)?)[\d.]*(?![\w+#-])", re.IGNORECASE)
MAX_SOURCE = 256 * 1024


def extract_code(completion: str, think_end: str) -> str:
    """Return the program after thinking; `NoAnswer` if there is none.

    It is the last closed block tagged as Python, or without one the last that has no tag.
    """
    blocks = list(_blocks(after_thinking(completion, think_end, required=False)))
    sources = [source for tag, source in blocks if _PYTHON.match(tag)]
    if not (sources := sources or [source for tag, source in blocks if not tag]):
        raise NoAnswer("no closed ```python block")
    if len(source := sources[-1]) > MAX_SOURCE:
        raise NoAnswer(f"a program of {len(source)} characters: over the limit of {MAX_SOURCE}")
    if not source.strip():
        raise NoAnswer("the last code block is empty")
    return source


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield tag and text of the closed fenced blocks, as CommonMark has them.

    In addition a block may open and close within a line of text, and a Python block ends one of
    another language that was not closed.
    """
    prefix = fence = tag = ""
    lines: list[str] = []
    for line in text.split("\n"):
        rest = line.rstrip("\r")
        indent = rest.lstrip(" \t>")
        if fence and rest.endswith(fence) and rest.count(fence) == 1 and indent != fence:
            lines.append(rest.removesuffix(fence))  # code and fence in one line
            rest = indent = fence
        after = indent.lstrip(fence[:1] or " ")
        closes = len(indent) - len(after) >= len(fence) and not re.match(r"\w", after)
        if fence and closes and len(rest) - len(indent) <= len(prefix) + 3:
            source = "\n".join([*lines, ""])
            if ">" in prefix:
                source = re.sub(r"(?m)^[ \t]*> ?", "", source)
            yield tag, textwrap.dedent(source) if source.lstrip("\r\n")[:1] in " \t" else source
            fence, rest = "", after
        opening = _OPENING.fullmatch(rest)
        before, mark, info = opening.groups() if opening else ("", "", "")
        is_other = tag and not _PYTHON.match(tag) and not before.strip() and _PYTHON.match(info)
        if (
            mark
            and (not fence or is_other)
            and (not before.strip(" \t>") or " " not in info.strip())
        ):
            prefix, fence, tag, lines = before, mark, info.strip(), []
        else:
            lines.append(line)


def make_code_verifier(settings: SandboxSettings, think_end: str) -> Verifier:
    """Return the verifier of programs; `SandboxUnavailable` if the host lacks the isolation."""
    isolation.require(settings)

    def verify(completion: str, gold: str, meta: dict[str, Any]) -> Verdict:
        try:
            source = extract_code(completion, think_end)
        except NoAnswer as e:
            return Verdict(Outcome.NO_ANSWER, str(e))
        with giant_integers():
            try:
                cases = read_cases(gold, function_name(meta))
            except BadTests as e:
                raise VerifierDown(
                    f"tests of a programming problem: {e}; check the data set"
                ) from e
            if 0 < settings.max_tests < len(cases):
                cases = nlargest(settings.max_tests, cases, key=lambda c: len(str(c.run)))
            return verify_program(source, cases, settings)

    return verify


def function_name(meta: dict[str, Any]) -> str | None:
    """Return the function that the tests call.

    It is `fn_name`, HumanEval's `entry_point`, or in LiveCodeBench's `metadata`.
    """
    metadata = parsed(meta.get("metadata"))
    name = meta.get("fn_name") or meta.get("entry_point")
    name = name or (isinstance(metadata, dict) and metadata.get("func_name"))
    return str(name) if name else None


def verify_program(source: str, cases: list[Case], settings: SandboxSettings) -> Verdict:
    """Run the tests up to the first that fails."""
    expected = max((len(c.expected) for c in cases if isinstance(c.expected, str)), default=0)
    # In whole KiB and with a margin, so that a program learns nothing from its limit.
    output_kib = max(settings.output_kib, expected // 256)
    settings = settings.model_copy(update={"output_kib": output_kib})
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
