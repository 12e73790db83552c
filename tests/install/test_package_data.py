"""A wheel holds every data file that the package reads."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_data_file_of_the_package_is_in_setup() -> None:
    (setup,) = (
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    (value,) = (k.value for k in setup.keywords if k.arg == "package_data")
    patterns = ast.literal_eval(value)["megatron_rl"]
    package = ROOT / "megatron_rl"
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    built = {".py", ".pyc", ".so"}
    files = {p for p in package.rglob("*") if p.is_file() and p.suffix not in built}
    assert {str(p.relative_to(ROOT)) for p in files - shipped} == set()
    assert all(any(package.glob(pattern)) for pattern in patterns)
