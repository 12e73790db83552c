"""Tests of programming problems in the formats of public data sets; comparison of outputs."""

import ast
import base64
import io
import json
import math
import pickle
import re
import reprlib
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, permutations
from typing import Any

import msgspec

from megatron_rl.rewards.code.sandbox import ProgramResult

FLOAT_TOLERANCE = 1e-6
"""Relative and absolute tolerance of expected outputs that have a decimal point."""
MAX_NUMBER = 1000  # longest word that is compared as a number


class BadTests(ValueError):
    """The tests of a problem cannot be parsed; the message describes them."""


class Case(msgspec.Struct, frozen=True):
    r"""One test. Example: `Case({"stdin": "1 2\n"}, "3\n")`."""

    run: dict[str, Any]  # input for the harness; never contains the expected result
    expected: Any  # text of standard output, or a function's result
    wrapped: bool = False  # True if the result may also be a list of the expected one


def read_cases(text: str, function: str | None = None) -> list[Case]:
    """Parse the tests of a problem.

    Args:
        text: JSON: `{"inputs": [...], "outputs": [...], "fn_name": ...}` (TACO, APPS), a list of
            `{"input", "output", "testtype" or "type", "fn_name"}` (DeepCoder, LiveCodeBench,
            PrimeIntellect), a list of `assert f(x) == y` (MBPP) or of scripts with asserts; or a
            script itself (HumanEval's `check`, KodCode's functions `test_...`); or LiveCodeBench's
            packed form.
        function: name of the function if the tests do not have it.

    Raises:
        BadTests: the text is none of these, or has no test.
    """
    with giant_integers():
        try:
            cases = _read(_decode(text), function)
        except (TypeError, AttributeError, LookupError, RecursionError) as e:
            raise BadTests(f"a test has another form: {type(e).__name__}: {e}") from None
    if not cases:
        raise BadTests("the problem has no tests")
    return cases


def _read(data: Any, function: str | None) -> list[Case]:
    if isinstance(data, dict):
        data = next((data[key] for key in _LISTS if key in data), data)
    if isinstance(data, str):
        data = [data]
    if isinstance(data, dict):
        return _from_columns(data, function)
    if not isinstance(data, list):
        raise BadTests(f"tests are a {type(data).__name__}: expected a list or a mapping")
    return [
        _from_asserts(t, function) if isinstance(t, str) else _from_row(t, function) for t in data
    ]


_LISTS = ("assert", "assert_case", "test_cases", "test_list", "tests")
"""Keys under which data sets keep the list of tests."""


@contextmanager
def giant_integers() -> Iterator[None]:
    """Lift Python's limit of 4,300 digits, as the sandbox does, whose time is limited."""
    digits = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(digits)


def _decode(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    if "assert" in text:
        return text
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
    inputs, outputs = (data.get(f"{side}s", data.get(side)) for side in ("input", "output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadTests(f"tests have the keys {sorted(data)}: expected inputs and outputs")
    name = data.get("fn_name") or function
    if len(inputs) != len(outputs):
        raise BadTests(f"{len(inputs)} inputs, {len(outputs)} outputs")
    pairs = zip(inputs, outputs, strict=True)
    if name is None:
        return [Case({"stdin": _text(i)}, _text(o)) for i, o in pairs]
    return [_call(name, i, o) for i, o in pairs]


def _from_row(row: Any, function: str | None) -> Case:
    if not isinstance(row, dict) or not {"input", "output"} <= set(row):
        raise BadTests(f"a test is {str(row)[:80]!r}: expected input and output")
    kind = row.get("testtype") or row.get("type") or ("functional" if function else "stdin")
    if kind in ("stdin", "stdin_stdout"):
        return Case({"stdin": _text(row["input"])}, _text(row["output"]))
    name = row.get("fn_name") or (row.get("metadata") or {}).get("func_name") or function
    if not name:
        raise BadTests("a functional test without the function's name")
    return _call(name, row["input"], row["output"])


def _call(name: str, args: Any, output: Any) -> Case:
    """Return a call's test: arguments and result are JSON values, or texts of one value a line."""
    if isinstance(args, str):
        args = [parsed(line) for line in args.splitlines() if line.strip()]
        return Case({"call": name, "args": args}, parsed(output))
    # APPS, TACO and PrimeIntellect write most results as a list of one: both forms are accepted.
    wrapped = isinstance(output, list) and len(output) == 1
    return Case({"call": name, "args": list(args)}, output[0] if wrapped else output, wrapped)


def _from_asserts(text: str, function: str | None) -> Case:
    """Turn `assert f(1) == 2` into a record of f(1), which is compared with 2 outside the sandbox.

    So are the asserts of HumanEval's `check` and of functions `test_...`. Those within other
    statements stay as they are, and the sandbox evaluates them.
    """
    try:
        tree = ast.parse(text.strip())
    except SyntaxError as e:
        raise BadTests(f"test {text[:80]!r}: {e}") from None
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise BadTests(f"test {text[:80]!r}: expected one assert or more")
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    tests = [n for n in functions if n.name == "check" or n.name.startswith("test_")]
    expected: list[Any] = []
    for body in [tree.body, *(n.body for n in tests)]:
        for index, node in enumerate(body):
            if isinstance(node, ast.Assert):
                left, right = _split(node.test)
                body[index : index + 1] = ast.parse(f"__assert__({len(expected)}, {left})").body
                expected.append(right)
    calls = [n for n in tree.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    for test in () if calls else tests:
        given = [a.arg for a in test.args.args]
        if len(given) != (test.name == "check") or test.decorator_list or (given and not function):
            raise BadTests(f"the function {test.name}({', '.join(given)}) cannot be called")
        tree.body += ast.parse(f"{test.name}({function if given else ''})").body
    return Case({"script": ast.unparse(tree)}, expected)


def _split(test: ast.expr) -> tuple[str, Any]:
    """Return the expression for the sandbox, and the value that it must equal."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for left, right in permutations((test.left, test.comparators[0])):
            with suppress(ValueError, TypeError):
                return ast.unparse(left), ast.literal_eval(right)
    return f"bool({ast.unparse(test)})", True


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def parsed(text: Any) -> Any:
    """Parse JSON, else a literal of Python; return what is neither as it is."""
    if isinstance(text, str):
        for parse in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, TypeError, MemoryError):
                return parse(text)
    return text


def failure(case: Case, result: ProgramResult) -> str:
    """Return the reason why a result is wrong; empty if it is right."""
    if result.status != "ok":
        line = "".join(result.error.strip().splitlines()[-1:])[:120]
        if re.match(r"(Syntax|Indentation|Tab)Error", line):
            return f"the program does not compile: {line}"
        if line.startswith("ModuleNotFoundError"):
            line += " in the sandbox (verifier.sandbox.modules)"
        return _STATUS.get(result.status, result.status) + (f": {line}" if line else "")
    if "stdin" in case.run:
        return "" if same_output(case.expected, result.stdout) else "wrong output"
    try:
        value = json.loads(result.value)
        if "call" in case.run:
            value = decode(value)
            right = same_value(case.expected, value)
            right = right or (case.wrapped and same_value([case.expected], value))
        else:
            value = [(index, decode(v)) for index, v in value]
            right = {index for index, _ in value} == set(range(len(case.expected)))
            right = right and all(bool(case.expected[index] == v) for index, v in value)
    except (ValueError, TypeError, RecursionError):
        return "the function returned no value that can be compared"
    return "" if right else f"wrong result {reprlib.repr(value)[:60]}"


@dataclass(frozen=True, eq=False)
class Foreign:
    """A value of a type of the program's own, which equals nothing."""

    text: str


def decode(value: Any) -> Any:
    """Return the value that the harness's `plain` encoded."""
    return _TYPES[value[0]](value[1]) if isinstance(value, list) else value


_TYPES: dict[str, Callable[[Any], Any]] = {
    "list": lambda items: [*map(decode, items)],
    "tuple": lambda items: tuple(map(decode, items)),
    "set": lambda items: set(map(decode, items)),
    "frozenset": lambda items: frozenset(map(decode, items)),
    "dict": lambda items: {decode(k): decode(v) for k, v in items},
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "complex": lambda pair: complex(*pair),
    "object": Foreign,
}


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
    if len(output) > MAX_NUMBER:
        return False
    try:
        a, b = float(expected), float(output)
    except ValueError:
        return False
    return math.isclose(a, b, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)


def same_value(expected: Any, value: Any) -> bool:
    """Compare a call's result with JSON: tuples are lists, keys are strings, floats have tolerance.

    Sets are sorted lists. The texts "True", "False" and "None" are also those values.
    """
    if isinstance(expected, str) and expected in _WORDS and not isinstance(value, str):
        return value is _WORDS[expected]
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, float) and isinstance(value, float):
        return math.isclose(expected, value, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    expected, value = (
        sorted(v, key=repr) if isinstance(v, set | frozenset) else v for v in (expected, value)
    )
    if isinstance(expected, list | tuple):
        same_length = isinstance(value, list | tuple) and len(expected) == len(value)
        return same_length and all(map(same_value, expected, value))
    if isinstance(expected, dict) and isinstance(value, dict):
        a, b = ({str(k): v for k, v in d.items()} for d in (expected, value))
        return (
            len(b) == len(value) and a.keys() == b.keys() and all(same_value(a[k], b[k]) for k in a)
        )
    return bool(expected == value)


_WORDS = {"True": True, "False": False, "None": None}
