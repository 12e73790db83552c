"""Programs run and end as under CPython; blocks and tests as models and data sets write them."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from megatron_rl.rewards.base import Outcome, SandboxUnavailable, VerifierDown
from megatron_rl.rewards.code import isolation
from megatron_rl.rewards.code.code_verdict import extract_code, make_code_verifier
from megatron_rl.rewards.code.sandbox import ProgramResult, run_tests
from megatron_rl.rewards.math.extract import NoAnswer
from tests.rewards.test_sandbox import KINDS, STRONG, run_one, settings_of

F = "```"
WIDE = {"memory_mib": 1024, "cpu_seconds": 10.0, "wall_seconds": 60.0, "total_seconds": 120.0}
"""Limits for programs that end by themselves, on a loaded machine."""
THREAD = (
    "import sys, threading\n"
    "def main():\n"
    "    def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
    "    print(f(50000))\n"
    "sys.setrecursionlimit(1 << 25)\nthreading.stack_size(1 << 27)\n"
    "threading.Thread(target=main).start()"
)
ENDS: dict[str, tuple[str, str]] = {
    THREAD: ("ok", "50000"),
    "import atexit\natexit.register(lambda: print(sum(a)))\na = [2, 3]": ("ok", "5"),
    "out = open(1, 'w')\nout.write(str(5))": ("ok", "5"),
    "import os\nout = os.fdopen(os.dup(1), 'w')\nout.write('5')": ("ok", "5"),
    "out = open('/dev/stdout', 'w')\nout.write('5')": ("ok", "5"),
    "import io\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(5)": ("ok", "5"),
    "sys.stdout.buffer.write(b'5')": ("ok", "5"),
    "sys.__stdout__.write('5')": ("ok", "5"),
    "class A:\n    def __del__(self): print(5)\na = A()": ("ok", "5"),
    "import threading\nthreading.Thread(target=sleep, args=[99], daemon=True).start()\nprint(5)": (
        "ok",
        "5",
    ),
    "print(5)\nexit()": ("ok", "5"),
    "print(5)\nsys.exit(None)": ("ok", "5"),
    "print(5)\nsys.exit('no')": ("error", "5"),
    "print(5)\nexit(3)": ("error", "5"),
    "print(5)\nraise KeyboardInterrupt": ("signal 2", "5"),
    "import os\nprint(5)\nos._exit(0)": ("ok", ""),
    "print(gcd(4, 6), pow(2, 5, 7), pow(9, 20), open(0).read())": (
        "ok",
        "2 4 12157665459056928801",
    ),
    "def f(a: List[int]) -> Optional[int]: return a[0]\nprint(f([5]), Counter('aa')['a'])": (
        "ok",
        "5 2",
    ),
    "print(len(str(2**20000)), hash('abc'))": ("ok", "6021 -4594863902769663758"),
    "print(__name__, sys.argv)": ("ok", "__main__ ['program.py']"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_ends_as_cpython_ends_it(kind: str) -> None:
    # Weak isolation denies opening a file for writing, and signals, to oneself too.
    denied = () if kind == "strong" else ("/dev/stdout", "KeyboardInterrupt")
    ends = {s: end for s, end in ENDS.items() if not any(word in s for word in denied)}
    got = {s: one(kind, s, **WIDE) for s in ends}
    assert {s: (r.status, r.stdout.strip()) for s, r in got.items()} == ends


def one(kind: str, source: str, **more: object) -> ProgramResult:
    """Return the result of one test without a look at the processes left (see `run_one`)."""
    (result,) = run_tests(source, [{"stdin": ""}], settings_of(kind, **more))
    return result


@pytest.mark.parametrize("kind", STRONG)
def test_a_stopped_or_interrupted_harness_and_a_left_over_child_cost_the_tests_limit(
    kind: str,
) -> None:
    stop = (
        "import os, signal, time\n"
        "for s in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):\n"
        "    os.kill(os.getppid(), s)\n"
        "print('stopped', flush=True)\ntime.sleep(100)"
    )
    result = run_one(kind, stop)
    assert (result.status, result.stdout) == ("time", "stopped\n")
    child = "import os, time\nprint(5, flush=True)\nif os.fork() == 0: {}"
    result = run_one(kind, child.format("time.sleep(100)"))
    assert (result.status, result.stdout) == ("ok", "5\n")
    result = run_one(kind, child.format("\n  while True: os.write(1, b'x'); time.sleep(0.01)"))
    assert result.status in ("ok", "time")
    assert run_one(kind, "print(10 ** 10 ** 8)").status in ("cpu", "time", "memory")
    many = "import os\nfor _ in range(9):\n  if os.fork() == 0: os.setsid()\nprint(input())"
    tests = [{"stdin": str(i)} for i in range(4)]
    results = list(run_tests(many, tests, settings_of(kind, processes=4)))
    assert [r.stdout.split()[:1] for r in results if r.status == "ok"] == [
        [str(i)] for i, r in enumerate(results) if r.status == "ok"
    ]


@pytest.mark.parametrize("kind", STRONG)
def test_third_party_modules_are_there_or_named(kind: str) -> None:
    source = "import numpy\nfrom sortedcontainers import SortedList\n"
    source += "print(int(numpy.sum(SortedList([2, 3]))))"
    gold = json.dumps({"inputs": [""], "outputs": ["5"]})
    verdict = make_code_verifier(settings_of(kind, **WIDE), "</think>")(fenced(source), gold, {})
    assert verdict.passed, verdict.reason
    bare = make_code_verifier(settings_of(kind, modules=(), **WIDE), "</think>")
    reason = bare(fenced(source), gold, {}).reason
    assert "No module named 'numpy' in the sandbox (verifier.sandbox.modules)" in reason


def test_weak_isolation_is_refused_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "seccomp_library", lambda: "/somewhere")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with pytest.raises(SandboxUnavailable, match="refused as root"):
        make_code_verifier(settings_of("weak"), "</think>")


def test_the_program_is_the_last_block_in_python_or_else_without_a_tag() -> None:
    blocks = {
        f"C:\n{F}cpp\nint\n{F}\nFinal:\n{F}python\na\n{F}\n": "a\n",
        f"{F}python\na\n{F}\nIt prints\n{F}\n5\n{F}\n": "a\n",
        f"{F}python\na\n{F}\n{F}json\n1\n{F}": "a\n",
        f"{F}json\n1\n{F}\nand\n{F}\nb\n{F}": "b\n",
        f"{F}python\nold\n{F}\n{F}python\nnew\n{F} ok": "new\n",
        f'{F}python title="a.py"\na\n{F}': "a\n",
        f"{F}{{.python .numberLines}}\na\n{F}": "a\n",
        f"{F}Python3\na\n{F}": "a\n",
        f"{F}py:main\na\n{F}": "a\n",
        f"1. Code:\n   {F}python\n   if a:\n     b\n   {F}\n": "if a:\n  b\n",
        f"- {F}cpp\n  x\n  {F}\n- {F}python\n  y\n  {F}": "y\n",
        f"> {F}python\n> a\n>   b\n> {F}": "a\n  b\n",
        "~~~python\na\n~~~\n": "a\n",
        f"~~~~py\n{F}\na\n~~~~": f"{F}\na\n",
        f"{F}python\ns='''{F}'''\na\n{F}\n": f"s='''{F}'''\na\n",
        f'{F}py\n"""\n    {F}python\n    f\n    {F}\n"""\n{F}': (
            f'"""\n    {F}python\n    f\n    {F}\n"""\n'
        ),
        f"{F}cpp\nint\n{F}python\nz\n{F}": "z\n",
        f"`{F}markdown\n{F}python\nz\n{F}\n`{F}": "z\n",
        f"Use {F}x{F} here\n{F}py\nq\n{F}": "q\n",
        f"{F}python\r\na\r\n{F}\r\n": "a\r\n",
        f"{F}python\na{F}": "a\n",
    }
    assert {text: extract_code(text, "</think>") for text in blocks} == blocks
    for text in ("pycon\n>>> a", "python-repl\n>>> a", "cpp\nint", "python\n "):
        with pytest.raises(NoAnswer):
            extract_code(f"{F}{text}\n{F}", "</think>")


def fenced(source: str) -> str:
    return f"</think>\n{F}python\n{source}\n{F}\n"


HUMANEVAL = (
    "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate(1) == 2\n"
    "    assert candidate(2) == 3, 'no'\n"
)
KODCODE = (
    "from solution import f\nimport math\n\ndef test_a():\n    assert f(1) == 2\n"
    "def test_b():\n    x = f(2)\n    assert math.isclose(x, 3)\n"
)
ADD_ONE = "def f(a):\n    return a + 1"
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "results in lists": ({"fn_name": "f", "inputs": [[1], [5]], "outputs": [[2], [6]]}, {}),
    "bare results": ({"fn_name": "f", "inputs": [[1], [5]], "outputs": [2, 6]}, {}),
    "texts": ({"fn_name": "f", "inputs": ["1", "5"], "outputs": ["2", "6"]}, {}),
    "singular keys": ({"fn_name": "f", "input": [[1]], "output": [[2]]}, {}),
    "row": ([{"type": "function_call", "fn_name": "f", "input": [2], "output": [3]}], {}),
    "nested": ({"test_cases": [{"type": "x", "fn_name": "f", "input": [2], "output": 3}]}, {}),
    "humaneval": (HUMANEVAL, {"entry_point": "f"}),
    "check": ([HUMANEVAL + "check(f)"], {}),
    "in a row": (["assert f(1) == 2\nassert f(2) == 3, 'no'\nassert 4 == f(3)"], {}),
    "list": ({"test_list": ["assert f(1) == 2"]}, {}),
    "statements": (["x = f(1)\nassert x == 2"], {}),
    "kodcode": (KODCODE, {}),
}
WRONG = {
    "another result": ADD_ONE.replace("1", "2"),
    "an early end": f"{ADD_ONE}\nimport os\nos._exit(0)",
    "equal to all": "class E:\n    def __eq__(self, other): return True\ndef f(a): return E()",
    "an early exit": f"{ADD_ONE}\nimport sys\nsys.exit(0)",
}


@pytest.mark.parametrize("kind", STRONG)
def test_every_form_of_a_functions_tests_tells_right_from_wrong(kind: str) -> None:
    verify = make_code_verifier(settings_of(kind, **WIDE), "</think>")
    for name, (tests, meta) in FORMATS.items():
        gold = tests if isinstance(tests, str) else json.dumps(tests)
        verdict = verify(fenced(ADD_ONE), gold, meta)
        assert verdict.passed, f"{name}: {verdict.reason}"
        for how, source in WRONG.items():
            assert verify(fenced(source), gold, meta).outcome is Outcome.WRONG, (name, how)


RESULTS: list[tuple[str, str, bool]] = [
    ("(1, 2)", "(1, 2)", True),
    ("(1, 2)", "[1, 2]", False),
    ("{1, 2}", "[1, 2]", False),
    ("{1, 2}", "{2, 1}", True),
    ("frozenset([1])", "{1}", True),
    ("set()", "set()", True),
    ("Counter('aab')", "{'a': 2, 'b': 1}", True),
    ("{'1': 2}", "{1: 2}", False),
    ("{(1, 2): b'x'}", "{(1, 2): b'x'}", True),
    ("deque([1])", "[1]", False),
    ("range(2)", "[0, 1]", False),
    ("True", "1", True),
    ("1.0", "1", True),
    ("0.1 + 0.2", "0.3", False),
    ("'1'", "1", False),
    ("None", "None", True),
    ("complex(1, 2)", "(1+2j)", True),
    ("b'ab'", "b'ab'", True),
    ("bytearray(b'a')", "b'a'", True),
    ("float('inf')", "float('inf')", True),
    ("float('nan')", "0.0", False),
    ("10 ** 5000", "10 ** 5000", True),
    ("10 ** 5000", "1", False),
    ("type('D', (), {'__repr__': lambda self: 'abc'})()", "'abc'", False),
]
TEXTS: list[tuple[str, str, bool]] = [
    ("True", "True", True),
    ("True", "true", True),
    ("'True'", "True", False),
    ("1", "True", False),
    ("None", "None", True),
    ("['x', 2]", "['x', 2]", True),
    ("(1, 2)", "[1, 2]", True),
    ("{'a': [1]}", "{'a': [1]}", True),
    ("'abc'", "abc", True),
    ("'abc'", '"abc"', True),
    ("[3]", "[3]", True),
    ("3", "[3]", False),
    ("0.3", "0.30000000001", True),
    ("2 ** 20000", "1", False),
]


@pytest.mark.parametrize("kind", STRONG)
def test_results_of_asserts_compare_as_python_and_those_of_calls_as_json(kind: str) -> None:
    verify = make_code_verifier(settings_of(kind, **WIDE), "</think>")
    for value, expected, right in RESULTS:
        source = f"def f(): return {value}"
        verdict = verify(fenced(source), json.dumps([f"assert f() == {expected}"]), {})
        assert verdict.passed is right, (value, expected, verdict.reason)
    row = {"input": "2", "testtype": "functional", "fn_name": "f"}
    for value, expected, right in TEXTS:
        source = f"def f(a): return {value}"
        verdict = verify(fenced(source), json.dumps([{**row, "output": expected}]), {})
        assert verdict.passed is right, (value, expected, verdict.reason)
    search = "class Solution:\n    def search(self, a): return a"  # the prelude has re.search
    method = [{**row, "fn_name": "search", "output": "2"}]
    assert verify(fenced(search), json.dumps(method), {}).passed
    for output in (["True"], "True", [True], True):
        native = [{"type": "function_call", "fn_name": "f", "input": [], "output": output}]
        assert verify(fenced("def f(): return True"), json.dumps(native), {}).passed, output


@pytest.mark.parametrize("kind", STRONG)
def test_outputs_larger_than_the_limit_pass_if_they_are_expected(kind: str) -> None:
    verify = make_code_verifier(settings_of(kind, output_kib=64, **WIDE), "</think>")
    gold = json.dumps({"inputs": [""], "outputs": ["x" * 2**20]})
    assert verify(fenced("print('x' * 2**20)"), gold, {}).passed
    assert "output limit" in verify(fenced("while True: print('x' * 2**20)"), gold, {}).reason


@pytest.mark.parametrize("kind", STRONG)
def test_tests_in_no_known_form_are_an_error_and_no_verdict(kind: str) -> None:
    verify = make_code_verifier(settings_of(kind), "</think>")
    for gold in (
        '{"inputs": ["1"], "outputs": ["1", "2"]}',
        '[{"input": 1}]',
        '[["x"]]',
        "[3]",
        '["def test_a(b): assert b"]',
        '["def check(c): assert c(1)"]',
    ):
        with pytest.raises(VerifierDown, match="check the data"):
            verify(fenced("print(1)"), gold, {})
