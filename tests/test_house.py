"""The house rules of the package: one name for one thing, short files, plain first lines."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.source import PACKAGE, ROOT, modules, tree

SHARED_FILE_NAMES = {"__init__.py", "__main__.py", "cli.py", "base.py"}
FILE_LINES, FUNCTION_LINES, PACKAGE_LINES = 400, 60, 41_200

QUESTION = re.compile(r"(What|Where|Whether|How|Which)\b")
# Words that newcomers had to decode -> the field's words.
FORBIDDEN = {
    r"rooms?": "package",
    r"mend(s|ed|ing)?": "fix, workaround",
    r"hush(ed)?": "silence",
    r"worded": "formatted",
    r"nursery": "fork server",
    r"shel(f|ves)": "retention",
    r"anew": "again",
    r"somebody|nobody|whoever": "name who",
    r"beside": "next to, with",
    r"(de)?quantis\w*": "quantize",
    r"normalis\w*": "normalize",
    r"initialis\w*": "initialize",
    r"serialis\w*": "serialize",
    r"recognis\w*": "recognize",
    r"organis\w*": "organize",
    r"\w*centred": "centered",
    r"behaviour": "behavior",
    r"neighbours?": "neighbor",
}
WORDS = re.compile(r"\b(" + "|".join(FORBIDDEN) + r")\b", re.IGNORECASE)
# Names that fit every result say nothing.
VARIABLES = {"found", "said", "asked", "told", "heard"}


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Yield (file and line, node) of every node of these kinds in the package."""
    for path in modules().values():
        for node in ast.walk(tree(path)):
            if isinstance(node, kinds):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node


def documents() -> list[Path]:
    """Return the source files and the pages that people read."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "patches").glob("*.md")]
    scripts = [*(ROOT / "examples").rglob("*"), *(ROOT / "tools").glob("*.py"), ROOT / "setup.py"]
    return [
        *modules().values(),
        *pages,
        *(p for p in scripts if p.suffix in (".py", ".sh", ".yaml")),
    ]


def test_one_file_name_and_one_class_name_mean_one_thing() -> None:
    files, classes = defaultdict(list), defaultdict(list)
    for path in modules().values():
        files[path.name].append(str(path.relative_to(ROOT)))
    for where, node in nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        classes[node.name].append(where)
    doubled = {n: f for n, f in files.items() if len(f) > 1 and n not in SHARED_FILE_NAMES}
    assert doubled == {}
    assert {name: places for name, places in classes.items() if len(places) > 1} == {}


def test_files_functions_and_the_package_stay_short() -> None:
    lengths = {str(p.relative_to(ROOT)): p.read_text().count("\n") for p in modules().values()}
    assert {path: n for path, n in lengths.items() if n > FILE_LINES} == {}
    assert sum(lengths.values()) <= PACKAGE_LINES
    functions = {}
    for where, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        functions[where] = (node.end_lineno or 0) - node.lineno + 1
    assert {where: n for where, n in functions.items() if n > FUNCTION_LINES} == {}


def test_docstrings_begin_with_a_fact_or_an_imperative() -> None:
    """Ruff's D401 checks functions; here, attributes too, for first lines that ask."""
    questions = []
    for where, node in nodes(ast.Expr):
        assert isinstance(node, ast.Expr)
        text = node.value.value if isinstance(node.value, ast.Constant) else None
        if isinstance(text, str) and QUESTION.match(text):
            questions.append(f"{where}: {text.splitlines()[0]}")
    assert questions == []


def test_words_are_those_of_the_trade() -> None:
    uses = [
        f"{path.relative_to(ROOT)}:{number}: {match.group(0)}"
        for path in documents()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in WORDS.finditer(line)
    ]
    assert uses == []


def test_variables_are_named_for_their_contents() -> None:
    names = [
        f"{where}: {node.id}"
        for where, node in nodes(ast.Name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VARIABLES
    ]
    assert names == []


def test_the_package_is_where_these_tests_look() -> None:
    assert (PACKAGE / "train.py").is_file()
    assert len(modules()) > 100
