"""Programs against tests: formats, comparison, extraction."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from megatron_rl.rewards.base import Outcome
from megatron_rl.rewards.code.cases import BadTests, read_cases, same_output, same_value
from megatron_rl.rewards.code.code_verdict import extract_code, function_name, make_code_verifier
from megatron_rl.rewards.math.extract import NoAnswer
from tests.rewards.test_sandbox import KINDS, problem, settings_of

needs_strong = pytest.mark.skipif(bool(problem("strong")), reason=problem("strong")[:200])

ADD = "a, b = map(int, input().split())\nprint(a + b)"
DOUBLE = "def double(x):\n    return x * 2"
STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
FORMATS: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("columns", STDIN, ADD, {}),
    ("lines", {"inputs": [["1 2"]], "outputs": [["3"]]}, ADD, {}),
    ("deepcoder", [{"input": "1 2\n", "output": "3", "type": "stdin_stdout"}], ADD, {}),
    ("livecodebench", [{"input": "1 2\n", "output": "3", "testtype": "stdin"}], ADD, {}),
    ("taco call", {"inputs": [[4]], "outputs": [[8]], "fn_name": "double"}, DOUBLE, {}),
    (
        "livecodebench call",
        [{"input": "4", "output": "8", "testtype": "functional"}],
        "class Solution:\n    def double(self, x: int) -> int:\n        return 2 * x",
        {"metadata": '{"func_name": "double"}'},
    ),
    (
        "primeintellect call",
        [{"type": "function_call", "fn_name": "double", "input": [4], "output": 8}],
        DOUBLE,
        {},
    ),
    ("asserts", ["assert double(4) == 8", "assert double('ab') == 'abab'"], DOUBLE, {}),
    ("assert of truth", ["assert double(4) > 7", "assert not double(0)"], DOUBLE, {}),
]


def completion(source: str) -> str:
    return f"<think>hm ```python\nprint('no')\n``` </think>Here:\n```python\n{source}\n```\nDone."


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "tests", "source", "meta"), FORMATS, ids=[f[0] for f in FORMATS])
def test_every_format_tells_right_from_wrong(
    kind: str, name: str, tests: Any, source: str, meta: dict[str, Any]
) -> None:
    verify = make_code_verifier(settings_of(kind), "</think>")
    verdict = verify(completion(source), json.dumps(tests), meta)
    assert verdict.outcome is Outcome.CORRECT, verdict.reason
    wrong = source.replace("a + b", "a - b").replace("x * 2", "0").replace("2 * x", "0")
    verdict = verify(completion(wrong), json.dumps(tests), meta)
    assert verdict.outcome is Outcome.WRONG
    assert verdict.reason.startswith("test 1 of ")


@needs_strong
def test_the_reason_says_what_went_wrong() -> None:
    reasons = {
        "print(1": "does not compile",
        "raise ValueError('bad')": "error: ValueError: bad",
        "import time; time.sleep(9)": "over the time limit",
        "x = bytearray(10**9)": "over the memory limit",
        "while True: print('x' * 1000)": "over the output limit",
        "print(3); import sys; sys.exit(1)": "error",
    }
    verify = make_code_verifier(settings_of("strong"), "</think>")
    for source, reason in reasons.items():
        verdict = verify(completion(source), json.dumps(STDIN), {})
        assert verdict.outcome is Outcome.WRONG
        assert reason in verdict.reason
    verdict = verify("no code at all", json.dumps(STDIN), {})
    assert verdict.outcome is Outcome.NO_ANSWER
    assert "no closed" in verdict.reason


def test_the_last_closed_block_after_thinking_counts() -> None:
    text = "```python\na\n```</think>```python\nb\n``` or ```py\nc\n``` or ```python\nd"
    assert extract_code(text, "</think>") == "c\n"
    with pytest.raises(NoAnswer, match="thinking did not end"):
        extract_code("<think>```python\na\n```", "</think>")
    assert extract_code("```\nplain\n```", "</think>") == "plain\n"


def test_livecodebench_packed_tests_are_read_and_cannot_run_code() -> None:
    rows = json.dumps([{"input": "1 2\n", "output": "3", "testtype": "stdin"}])
    packed = base64.b64encode(zlib.compress(pickle.dumps(rows))).decode()
    assert read_cases(packed) == read_cases(rows)
    hostile = base64.b64encode(zlib.compress(b"cos\nsystem\n(S'true'\ntR.")).decode()
    with pytest.raises(BadTests, match=r"refer to os\.system"):
        read_cases(hostile)


def test_bad_tests_are_an_error_of_the_data() -> None:
    messages = {
        "[]": "no tests",
        "{}": "expected inputs and outputs",
        '{"inputs": ["1"], "outputs": []}': "1 inputs, 0 outputs",
        '[{"input": "1"}]': "expected input and output",
        '[{"input": "1", "output": "1", "type": "function_call"}]': "function's name",
        '["print(1)"]': "expected one assert",
        '["assert f("]': "never closed",
        "not json": "neither JSON",
        "7": "expected a list",
    }
    for tests, message in messages.items():
        with pytest.raises(BadTests, match=message):
            read_cases(tests)


def test_outputs_compare_up_to_white_space_and_rounding() -> None:
    pairs = {
        ("3\n", "3"): True,
        ("3 4\n", "3  4 \n\n"): True,
        ("a\nb", "a\nb\n"): True,
        ("a\nb", "a b"): False,
        ("0.5", "0.50000001"): True,
        ("0.5", "0.6"): False,
        ("1e-3", "0.001"): True,
        ("5", "5.0"): False,
        ("5", "6"): False,
        ("YES", "yes"): False,
        ("", ""): True,
        ("1.0", "x"): False,
    }
    assert {pair: same_output(*pair) for pair in pairs} == pairs


def test_results_compare_as_json() -> None:
    triples: list[tuple[Any, Any, bool]] = [
        (1, 1, True),
        (1, True, False),
        (True, True, True),
        (1.5, 1.5000001, True),
        ([1, [2]], [1, [2]], True),
        ((1, 2), [1, 2], True),
        ({1, 2}, [1, 2], True),
        ({1: "a"}, {"1": "a"}, True),
        ([1, 2], [2, 1], False),
        ([1], [1, 2], False),
        (None, None, True),
        ("a", "b", False),
    ]
    assert [t for t in triples if same_value(t[0], t[1]) is not t[2]] == []


def test_the_functions_name_is_found_in_meta() -> None:
    assert function_name({"fn_name": "f"}) == "f"
    assert function_name({"metadata": {"func_name": "g"}}) == "g"
    assert function_name({"metadata": "broken"}) is None
    assert function_name({}) is None


@needs_strong
def test_only_the_largest_tests_run_when_their_number_is_limited() -> None:
    verify = make_code_verifier(settings_of("strong", max_tests=1), "</think>")
    tests = {"inputs": ["1 2\n", "1000 1000\n"], "outputs": ["wrong", "2000"]}
    verdict = verify(completion(ADD), json.dumps(tests), {})
    assert (verdict.outcome, verdict.reason) == (Outcome.CORRECT, "passed 1 tests")
