"""Imports point down only, and what must be light stays light (the lines of the design)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_rl"

# Room -> rooms that it may import. What is not listed is refused.
MAY_IMPORT: dict[str, set[str]] = {
    "section": set(),
    "messages": set(),
    "scaling": set(),
    # A loss is the section of the configuration that names it.
    "algorithm": {"section"},
    "recipes": {"section"},
    "config": {"section", "algorithm", "recipes", "rewards"},
    "compat": {"config"},
    # Standard library only: it works where nothing else is installed yet.
    "patching": set(),
    "kernels": {"config", "compat", "algorithm"},
    "models": {"config", "compat"},
    "weights": {"config", "messages", "compat", "models"},
    "rewards": {"section"},
    # Estimators, and what puts an evaluation together.
    "evaluation": {
        *("config", "messages", "data", "rewards", "observe", "patching"),
        *("rollout", "orchestrator", "convert", "launch"),
    },
    "data": {"config", "messages", "rewards"},
    "observe": {"config", "messages", "scaling"},
    "policy": {
        *("config", "messages", "compat", "patching"),
        *("algorithm", "kernels", "models", "weights", "data"),
    },
    "rollout": {
        *("config", "messages", "compat", "patching"),
        *("algorithm", "kernels", "models", "weights"),
    },
    "orchestrator": {"config", "messages", "algorithm", "data", "rewards", "observe", "weights"},
    # What puts a run together.
    "plan": {"config", "orchestrator", "models"},
    "convert": {"models"},
    "doctor": {"*"},
    "recipes_cli": {"config", "recipes"},
    "ablate": {"config", "recipes", "observe", "scaling"},
    "launch": {"*"},
    "plugin": {"*"},
    "cli": {"*"},
}
HEAVY = {"torch", "megatron", "vllm", "transformers", "transformer_engine", "safetensors"}
# Modules of these rooms reach nothing heavy when they are imported, not even through others.
LIGHT_ROOMS = {
    *("section", "config", "messages", "algorithm", "recipes", "scaling", "observe"),
    *("orchestrator", "plan", "recipes_cli", "ablate", "cli", "patching", "doctor"),
}


@cache
def modules() -> dict[str, Path]:
    """Name -> file of every module in the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    # The plug-in starts what `launch` starts, inside Megatron's own process.
    if f"{module}.".startswith(f"{PACKAGE.name}.policy.plugin."):
        return "plugin"
    return module.split(".")[1] if "." in module else ""


def _is_type_checking(node: ast.If) -> bool:
    test = node.test
    name = test.id if isinstance(test, ast.Name) else getattr(test, "attr", "")
    return name == "TYPE_CHECKING"


@cache
def imports(module: str) -> list[tuple[str, bool]]:
    """(imported name, whether importing the module runs it) of every import in a module."""
    path = modules()[module]
    is_package = path.name == "__init__.py"
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, runs: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, runs) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join(parts + ([node.module] if node.module else []))
            # `from package import name` may import the module package.name.
            found.extend((f"{base}.{alias.name}", runs) for alias in node.names)
        inside = runs and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and _is_type_checking(node):
            for child in node.orelse:
                visit(child, runs)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text(), filename=str(path)), True)
    return found


def test_the_import_reader_sees_relative_lazy_and_type_checking_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "b.py"
    source.write_text(
        "from typing import TYPE_CHECKING\nfrom ..x import y\nfrom . import z\n"
        "if TYPE_CHECKING:\n    import torch\ndef f():\n    import vllm\n"
    )
    table = {"megatron_rl.a.b": source}
    monkeypatch.setattr(sys.modules[__name__], "modules", lambda: table)
    imports.cache_clear()
    found = imports("megatron_rl.a.b")
    imports.cache_clear()
    assert found == [
        ("typing.TYPE_CHECKING", True),
        ("megatron_rl.x.y", True),
        ("megatron_rl.a.z", True),
        ("vllm", False),
    ]


@pytest.mark.parametrize("module", modules())
def test_arrows_point_down_only(module: str) -> None:
    room = room_of(module)
    if room == "":
        assert not imports(module), "megatron_rl/__init__.py imports nothing"
        return
    assert room in MAY_IMPORT, f"{room} is a new room: give it its place in the design and here"
    allowed = MAY_IMPORT[room] | {room}
    for name, _ in imports(module):
        if name.startswith("megatron_rl.") and "*" not in allowed:
            target = room_of(name)
            if target.startswith("__"):  # `from megatron_rl import __version__`
                continue
            assert target in allowed, (
                f"{module} imports {name}: {room} may import {sorted(allowed)}"
            )


def test_the_allowed_arrows_have_no_cycle() -> None:
    def below(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"rooms import each other: {' -> '.join((*path, room))}"
        for other in MAY_IMPORT[room] - {"*"}:
            below(other, (*path, room))

    for room in MAY_IMPORT:
        below(room, ())


@pytest.mark.parametrize("module", [m for m in modules() if room_of(m) == "orchestrator"])
def test_orchestrator_imports_neither_megatron_nor_vllm_nor_torch(module: str) -> None:
    for name, _ in imports(module):
        assert name.split(".")[0] not in HEAVY, f"{module} imports {name}"


def reached(module: str) -> dict[str, list[str]]:
    """Everything that importing a module imports -> the chain of modules that leads to it."""
    seen: dict[str, list[str]] = {}
    queue = [(module, [module])]
    while queue:
        name, chain = queue.pop()
        # The packages above a module are imported with it.
        parents = [".".join(name.split(".")[: i + 1]) for i in range(name.count("."))]
        for current in (name, *parents):
            if current in seen:
                continue
            seen[current] = chain
            if current in modules():
                queue += [(n, [*chain, n]) for n, runs in imports(current) if runs]
    return seen


@pytest.mark.parametrize("module", [m for m in modules() if room_of(m) in LIGHT_ROOMS])
def test_light_rooms_reach_no_heavy_package_through_others(module: str) -> None:
    for name, chain in reached(module).items():
        assert name.split(".")[0] not in HEAVY, " -> ".join(chain)


LIGHT_MODULES = [m for m in modules() if room_of(m) in LIGHT_ROOMS and not m.endswith("__main__")]
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            raise ImportError(name + " is blocked: this machine has no torch")
sys.meta_path.insert(0, Blocker())
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_config_scaling_and_cli_leave_torch_unimported() -> None:
    done = run_python(
        "import sys, megatron_rl.config, megatron_rl.scaling, megatron_rl.cli\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_light_modules_import_where_torch_cannot_be_imported() -> None:
    done = run_python(BLOCKER.format(heavy=HEAVY) + f"import {', '.join(LIGHT_MODULES)}")
    assert done.returncode == 0, done.stderr


def test_the_blocker_blocks() -> None:
    done = run_python(BLOCKER.format(heavy=HEAVY) + "import torch")
    assert "torch is blocked" in done.stderr


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _changes_of_megatron(tree: ast.AST) -> list[int]:
    """Lines that set an attribute of something imported from Megatron."""
    theirs: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron":
            theirs |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found = [a for a in node.names if a.name.split(".")[0] == "megatron"]
            theirs |= {a.asname or "megatron" for a in found}
    lines = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [t for t in node.targets if isinstance(t, ast.Attribute)]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.Delete):
            places = node.targets if isinstance(node, ast.Delete) else [node.target]
            targets = [t for t in places if isinstance(t, ast.Attribute)]
        elif isinstance(node, ast.Call) and _root(node.func) in ("setattr", "delattr"):
            targets = node.args[:1]
        lines += [t.lineno for t in targets if _root(t) in theirs]
    return lines


@pytest.mark.parametrize("module", [m for m in modules() if room_of(m) != "compat"])
def test_nothing_of_megatron_is_changed_outside_compat(module: str) -> None:
    assert _changes_of_megatron(ast.parse(modules()[module].read_text())) == []


def test_the_look_for_changes_sees_them() -> None:
    text = """
import megatron.core.utils
from megatron.training import training as T
T.get_megatron_optimizer = wrapped
megatron.core.utils.x = 1
setattr(T, "y", 2)
own = T.build()
own.z = 3
"""
    assert _changes_of_megatron(ast.parse(text)) == [4, 5, 6]
