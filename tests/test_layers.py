"""Imports point down only, and the light packages stay light (docs/architecture.md)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.source import PACKAGE, ROOT, cycles, imports, imports_of, module_of, modules, tree

# Package or top-level module -> those that it may import. The order is that of the layers, bottom
# first: a layer imports earlier ones only.
LAYERS = {
    "files": "",
    "import_path": "",
    "liveness": "files",
    "section": "",
    "message_parts": "",
    "messages": "message_parts",
    "run_lock": "files",
    "delivery": "",
    "orchestrator_connection": "messages delivery",
    "scaling": "",
    # A loss is the section of the configuration that names it; so are a recipe's and a verifier's.
    "algorithm": "section",
    "recipes": "section",
    "rewards": "import_path section",
    "config": "files section algorithm recipes rewards",
    "compat": "",
    "kernels": "",
    "models": "files config compat kernels",
    "data": "config algorithm rewards",
    "metrics": "files config scaling",
    "weights": "config messages orchestrator_connection",
    "orchestrator": (
        "files run_lock config messages delivery compat algorithm data rewards metrics"
    ),
    "rollouts": "import_path config messages rewards models",
    "generator": (
        "files liveness run_lock config messages orchestrator_connection compat models weights"
        " rollouts"
    ),
    "trainer": (
        "files liveness config messages orchestrator_connection compat algorithm data kernels"
        " models weights"
    ),
    "launch": "run_lock config compat weights orchestrator generator",
    "train": (
        "liveness config messages run_lock compat launch models weights orchestrator generator"
        " trainer"
    ),
    "megatron_plugin": (
        "files liveness config messages run_lock compat launch models weights orchestrator trainer"
    ),
    "commands": (
        "files liveness run_lock config messages recipes rewards scaling compat kernels models data"
        " metrics weights orchestrator generator launch"
    ),
    "cli": "section run_lock config compat scaling orchestrator generator train commands",
}
MAY_IMPORT = {layer: others.split() for layer, others in LAYERS.items()}
HEAVY = {"torch", "megatron", "vllm", "transformers", "transformer_engine", "safetensors"}
# Importing a module of these reaches nothing heavy, not even through others.
LIGHT = """
files liveness section config message_parts messages algorithm recipes rewards scaling data metrics
orchestrator launch train cli commands.alive commands.doctor commands.plan commands.recipes
commands.list_runs commands.study commands.verify weights.store_process generator.store_keeper
"""


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def own_imports(module: str) -> set[str]:
    """Return the modules of the package that a module imports anywhere, itself excluded."""
    names = (name for name, _ in imports(module) if f"{name}.".startswith(f"{PACKAGE.name}."))
    return {module_of(name) for name in names} - {module}


def test_the_import_reader_sees_relative_lazy_and_type_checking_imports(tmp_path: Path) -> None:
    source = tmp_path / "b.py"
    source.write_text(
        "from typing import TYPE_CHECKING\nfrom ..x import y\nfrom . import z\n"
        "if TYPE_CHECKING:\n    import torch\ndef f():\n    import vllm\n"
    )
    assert imports_of("megatron_rl.a.b", source) == [
        ("typing.TYPE_CHECKING", True),
        ("megatron_rl.x.y", True),
        ("megatron_rl.a.z", True),
        ("vllm", False),
    ]


def test_arrows_point_down_only() -> None:
    order = list(MAY_IMPORT)
    assert set(order) == {layer_of(module) for module in modules()} - {""}
    for layer, others in MAY_IMPORT.items():
        higher = [other for other in others if order.index(other) >= order.index(layer)]
        assert not higher, f"{layer} may not import {higher}: they come later in LAYERS"
    wrong, used = [], set()
    for module in modules():
        layer = layer_of(module)
        for name in own_imports(module):
            if layer_of(name) not in (layer, ""):
                used.add((layer, layer_of(name)))
                if layer_of(name) not in MAY_IMPORT.get(layer, []):
                    wrong.append(f"{module} imports {name}")
    assert wrong == []
    unused = [
        f"{a} -> {b}" for a, others in MAY_IMPORT.items() for b in others if (a, b) not in used
    ]
    assert unused == [], "LAYERS has arrows that nothing uses"


def test_no_modules_import_each_other() -> None:
    assert cycles({module: own_imports(module) for module in modules()}) == []
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]


def test_orchestrator_imports_neither_megatron_nor_vllm_nor_torch() -> None:
    own = [module for module in modules() if layer_of(module) == "orchestrator"]
    heavy = [f"{m}: {n}" for m in own for n, _ in imports(m) if n.split(".")[0] in HEAVY]
    assert heavy == []


def reached(module: str) -> dict[str, list[str]]:
    """Return everything that importing a module imports -> the chain of modules to it."""
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


def light_modules() -> list[str]:
    names = tuple(f"{PACKAGE.name}.{name}." for name in LIGHT.split())
    return [m for m in modules() if f"{m}.".startswith(names) and not m.endswith("__main__")]


def test_light_packages_reach_no_heavy_one_through_others() -> None:
    chains = [
        " -> ".join(chain)
        for module in light_modules()
        for name, chain in reached(module).items()
        if name.split(".")[0] in HEAVY
    ]
    assert chains == []


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            raise ImportError(name + " is blocked: it is not on this machine")
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


def test_light_modules_import_where_torch_cannot_be_imported() -> None:
    done = run_python(BLOCKER.format(heavy=HEAVY) + f"import {', '.join(light_modules())}")
    assert done.returncode == 0, done.stderr
    done = run_python(BLOCKER.format(heavy=HEAVY) + "import torch")
    assert "torch is blocked" in done.stderr


def test_trainers_work_where_vllm_cannot_be_imported() -> None:
    own = [m for m in modules() if layer_of(m) in ("trainer", "weights", "train")]
    lazily = [f"{m}: {n}" for m in own for n, _ in imports(m) if n.split(".")[0] == "vllm"]
    assert lazily == []
    assert {"megatron_rl.train", "megatron_rl.trainer.publisher"} <= {*own}
    done = run_python(BLOCKER.format(heavy={"vllm"}) + f"import {', '.join(own)}")
    assert done.returncode == 0, done.stderr


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def changes_of_megatron(tree: ast.AST) -> list[int]:
    """Return the lines that set an attribute of something imported from Megatron."""
    theirs: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron":
            theirs |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            aliases = [a for a in node.names if a.name.split(".")[0] == "megatron"]
            theirs |= {a.asname or "megatron" for a in aliases}
    lines = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [t for t in node.targets if isinstance(t, ast.Attribute)]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.Delete):
            changed = node.targets if isinstance(node, ast.Delete) else [node.target]
            targets = [t for t in changed if isinstance(t, ast.Attribute)]
        elif isinstance(node, ast.Call) and _root(node.func) in ("setattr", "delattr"):
            targets = node.args[:1]
        lines += [t.lineno for t in targets if _root(t) in theirs]
    return lines


def test_nothing_of_megatron_is_changed_outside_compat() -> None:
    changes = {
        module: changes_of_megatron(tree(path))
        for module, path in modules().items()
        if layer_of(module) != "compat"
    }
    assert {module: lines for module, lines in changes.items() if lines} == {}


def test_the_search_for_changes_sees_them() -> None:
    text = """
import megatron.core.utils
from megatron.training import training as T
T.get_megatron_optimizer = wrapped
megatron.core.utils.x = 1
setattr(T, "y", 2)
own = T.build()
own.z = 3
"""
    assert changes_of_megatron(ast.parse(text)) == [4, 5, 6]
