"""Tests of programming problems in the formats of public data sets; comparison of outputs."""

import ast
import base64
import io
import json
import math
import pickle
import zlib
from contextlib import suppress
from itertools import chain
from typing import Any

import msgspec

from megatron_rl.rewards.code.sandbox import ProgramResult

FLOAT_TOLERANCE = 1e-6
"""Relative and absolute tolerance of expected outputs that have a decimal point."""


class BadTests(ValueError):
    """The tests of a problem cannot be parsed; the message describes them."""


class Case(msgspec.Struct, frozen=True):
    r"""One test. Example: `Case({"stdin": "1 2\n"}, "3\n")`."""

    run: dict[str, Any]
    """Input for the harness; never contains the expected result."""
    expected: Any
    """Text of standard output, or a function's result."""


def read_cases(text: str, function: str | None = None) -> list[Case]:
    """Parse the tests of a problem.

    Args:
        text: JSON: `{"inputs": [...], "outputs": [...], "fn_name": ...}` (TACO, APPS), a list of
            `{"input", "output", "testtype" or "type", "fn_name"}` (DeepCoder, LiveCodeBench,
            PrimeIntellect), a list of `assert f(x) == y` (MBPP); or LiveCodeBench's packed form.
            `BadTests` if it is none of these, or has no test.
        function: name of the function if the tests do not have it.
    """
    data = _decode(text)
    data = data.get("assert", data) if isinstance(data, dict) else data
    if isinstance(data, dict):
        cases = _from_columns(data, function)
    elif isinstance(data, list) and data and all(isinstance(t, str) for t in data):
        cases = [_from_assert(t) for t in data]
    elif isinstance(data, list):
        cases = [_from_row(t, function) for t in data]
    else:
        raise BadTests(f"tests are a {type(data).__name__}: expected a list or a mapping")
    if not cases:
        raise BadTests("the problem has no tests")
    return cases


def _decode(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
        return json.loads(_StringOnly(io.BytesIO(packed)).load())
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError, TypeError) as e:
        raise BadTests(f"tests are neither JSON nor LiveCodeBench's packed form: {e}") from None


class _StringOnly(pickle.Unpickler):
    """Unpickler of built-in values; rejects every class, so that data cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"packed tests refer to {module}.{name}")


def _from_columns(data: dict[str, Any], function: str | None) -> list[Case]:
    if not {"inputs", "outputs"} <= set(data):
        raise BadTests(f"tests have the keys {sorted(data)}: expected inputs and outputs")
    name = data.get("fn_name") or function
    if len(data["inputs"]) != len(data["outputs"]):
        raise BadTests(f"{len(data['inputs'])} inputs, {len(data['outputs'])} outputs")
    pairs = zip(data["inputs"], data["outputs"], strict=True)
    if name is None:
        return [Case({"stdin": _text(i)}, _text(o)) for i, o in pairs]
    # APPS and TACO write a function's result as a list of one.
    return [
        Case({"call": name, "args": list(i)}, o[0] if isinstance(o, list) and len(o) == 1 else o)
        for i, o in pairs
    ]


def _from_row(row: Any, function: str | None) -> Case:
    if not isinstance(row, dict) or not {"input", "output"} <= set(row):
        raise BadTests(f"a test is {str(row)[:80]!r}: expected input and output")
    kind = row.get("testtype") or row.get("type") or ("functional" if function else "stdin")
    if kind in ("stdin", "stdin_stdout"):
        return Case({"stdin": _text(row["input"])}, _text(row["output"]))
    name = row.get("fn_name") or (row.get("metadata") or {}).get("func_name") or function
    if not name:
        raise BadTests("a functional test without the function's name")
    args = row["input"]
    if isinstance(args, str):
        args = [parsed(line) for line in args.splitlines() if line.strip()]
    return Case({"call": name, "args": list(args)}, parsed(row["output"]))


def _from_assert(text: str) -> Case:
    """Split `assert f(1) == 2`: the sandbox evaluates f(1), and 2 is compared outside."""
    try:
        tree = ast.parse(text.strip())
    except SyntaxError as e:
        raise BadTests(f"test {text[:80]!r}: {e}") from None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assert):
        raise BadTests(f"test {text[:80]!r}: expected one assert")
    test = tree.body[0].test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        with suppress(ValueError):
            expected = ast.literal_eval(test.comparators[0])
            return Case({"asserts": [ast.unparse(test.left)]}, [expected])
    return Case({"asserts": [f"bool({ast.unparse(test)})"]}, [True])


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def parsed(text: Any) -> Any:
    """Parse JSON; return what is not a text, or not JSON, as it is."""
    if isinstance(text, str):
        with suppress(ValueError):
            return json.loads(text)
    return text


def failure(case: Case, result: ProgramResult) -> str:
    """Return the reason why a result is wrong; empty if it is right."""
    if result.status != "ok":
        lines = result.error.strip().splitlines()
        return _STATUS.get(result.status, result.status) + (f": {lines[-1][:120]}" if lines else "")
    if "stdin" in case.run:
        return "" if same_output(case.expected, result.stdout) else "wrong output"
    try:
        value = json.loads(result.value)
    except ValueError:
        return "the function's result is not JSON"
    return "" if same_value(case.expected, value) else f"wrong result {str(value)[:60]}"


_STATUS = {
    "time": "over the time limit",
    "cpu": "over the CPU time limit",
    "memory": "over the memory limit",
    "output": "over the output limit",
    "file": "over the file size limit",
    "total": "over the time limit of all tests",
    "killed": "the program ended its sandbox",
}


def same_output(expected: str, output: str) -> bool:
    """Compare line by line and word by word, numbers by value."""
    a, b = ([line.split() for line in text.strip().splitlines()] for text in (expected, output))
    same_shape = [len(words) for words in a] == [len(words) for words in b]
    return same_shape and all(map(_same_word, chain(*a), chain(*b)))


def _same_word(expected: str, output: str) -> bool:
    if expected == output or ("." not in expected and "e" not in expected.lower()):
        return expected == output
    try:
        a, b = float(expected), float(output)
    except ValueError:
        return False
    return math.isclose(a, b, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)


def same_value(expected: Any, value: Any) -> bool:
    """Compare results: tuples are lists, keys are strings, floats have a tolerance."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, float) and isinstance(value, int | float):
        return math.isclose(expected, value, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    if isinstance(expected, list | tuple):
        same_length = isinstance(value, list) and len(expected) == len(value)
        return same_length and all(map(same_value, expected, value))
    if isinstance(expected, set | frozenset):
        return same_value(sorted(expected, key=repr), value)
    if isinstance(expected, dict):
        same_keys = isinstance(value, dict) and set(map(str, expected)) == set(value)
        return same_keys and all(same_value(v, value[str(k)]) for k, v in expected.items())
    return bool(expected == value)
