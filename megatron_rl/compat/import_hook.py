"""Changes of other packages' modules, made right after a module ran."""

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]
_CHANGES: list[tuple[tuple[str, ...], Change]] = []


def after_import(packages: tuple[str, ...], change: Change) -> None:
    """Call `change` with every module of these packages (or single modules), right after it ran.

    Modules that are imported already are changed now; a repeated call adds nothing.
    """
    if (packages, change) in _CHANGES:
        return
    _CHANGES.append((packages, change))
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, module in list(sys.modules.items()):
        if is_within(name, packages):
            change(module)


def is_within(name: str, packages: Sequence[str]) -> bool:
    """Return True if the module is one of these, or inside one of them."""
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        changes = [change for packages, change in _CHANGES if is_within(fullname, packages)]
        if not changes:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for change in changes:
                change(module)

        loader.exec_module = exec_module
        return spec
