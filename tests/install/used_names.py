"""The names of other packages that the product uses, and the arguments of its calls, by parsing.

A use is a path such as `vllm.AsyncLLM.from_args().abort`: `()` is the result of a call, or an
object of this class by its annotation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.install.declared_names import Call

Scope = dict[str, str]
"""Name in a file (`x` or `self.x`) -> path."""


@dataclass(frozen=True, slots=True)
class Use:
    """A use at a line of a file."""

    path: str
    call: Call | None
    line: str
    overrides: bool = False
    """A method of a subclass: compared with the base's only if the base has one of this name."""


def uses_of(files: Iterable[Path], packages: set[str]) -> list[Use]:
    """Return the uses of these top-level packages; of torch, those of names that are not public."""
    return [
        use
        for file in files
        if any(name in file.read_text() for name in packages)
        for use in _File(file, packages).uses()
        if use.path.partition(".")[0] != "torch" or _is_private(use.path)
    ]


def _is_private(path: str) -> bool:
    return any(p.startswith("_") and not p.startswith("__") for p in path.split("."))


class _File:
    def __init__(self, file: Path, packages: set[str]) -> None:
        self._file, self._packages = file, packages
        self._tree = ast.parse(file.read_text())
        self._functions = {
            n.name: n for n in ast.walk(self._tree) if isinstance(n, ast.FunctionDef)
        }
        self._around: ast.AST = self._tree

    def uses(self) -> Iterator[Use]:
        scope: Scope = {}
        for node in ast.walk(self._tree):
            for name, path in self._imports(node):
                scope[name] = path
                yield Use(path, None, self._line(node))
        yield from self._visit(self._tree, self._bound(self._tree, scope))

    def _line(self, node: ast.AST) -> str:
        return f"{self._file.name}:{getattr(node, 'lineno', 0)}"

    def _imports(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [(a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]
        elif isinstance(node, ast.Import):
            names = [
                (a.asname, a.name) if a.asname else (a.name.split(".")[0],) * 2 for a in node.names
            ]
        else:
            return
        yield from ((n, p) for n, p in names if p.partition(".")[0] in self._packages)

    def _visit(self, node: ast.AST, scope: Scope) -> Iterator[Use]:
        inside, around = scope, self._around
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside, self._around = self._bound(node, scope), node
        if isinstance(node, ast.ClassDef):
            yield from self._of_base(node, inside)
        path = self._path(node, inside)
        if isinstance(node, ast.Call) and (called := self._path(node.func, inside)):
            yield Use(called, self._call(node), self._line(node))
        elif path and isinstance(node, ast.Attribute):
            yield Use(path, None, self._line(node))
        for child in ast.iter_child_nodes(node):
            yield from self._visit(child, inside)
        self._around = around

    def _of_base(self, node: ast.ClassDef, scope: Scope) -> Iterator[Use]:
        """Yield methods that may override the base's; resolve `super()` and attributes of it."""
        bases = [base for b in node.bases if (base := self._path(b, scope))]
        for name in ("self", "super()"):
            scope.pop(name, None)
        if not bases:
            return
        scope["super()"] = f"{bases[0]}()"
        own = {name for inner in ast.walk(node) for name in _declared(inner)}
        for inner in ast.walk(node):
            of_self = isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self"
            if of_self and inner.attr not in own:
                scope[ast.unparse(inner)] = f"{bases[0]}().{inner.attr}"
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
                arguments = [*method.args.args[1:], *method.args.kwonlyargs]
                call = Call(0, tuple(a.arg for a in arguments), whole=False)
                path = f"{bases[0]}().{method.name}"
                yield Use(path, call, self._line(method), overrides=True)

    def _bound(self, node: ast.AST, scope: Scope) -> Scope:
        """Return the scope in a module, class or function: its annotations and assignments."""
        inside = dict(scope)
        arguments = getattr(node, "args", None)
        if isinstance(arguments, ast.arguments):
            for argument in [*arguments.args, *arguments.kwonlyargs]:
                inside.pop(argument.arg, None)
                self._annotate(argument.arg, argument.annotation, inside)
        for inner in ast.walk(node):
            if isinstance(inner, ast.AnnAssign):
                self._annotate(ast.unparse(inner.target), inner.annotation, inside)
            elif isinstance(inner, ast.Assign) and len(inner.targets) == 1:
                path = self._path(inner.value, inside)
                if path and isinstance(inner.targets[0], ast.Name | ast.Attribute):
                    inside.setdefault(ast.unparse(inner.targets[0]), path)
        return inside

    def _annotate(self, name: str, annotation: ast.AST | None, scope: Scope) -> None:
        path = self._path(annotation, scope) if annotation else None
        if path:
            scope[name] = f"{path}()"

    def _path(self, node: ast.AST, scope: Scope) -> str | None:
        if isinstance(node, ast.Name):
            return scope.get(node.id)
        if isinstance(node, ast.Attribute):
            if known := scope.get(ast.unparse(node)):
                return known
            base = self._path(node.value, scope)
            return f"{base}.{node.attr}" if base else None
        if isinstance(node, ast.Call):
            called = self._path(node.func, scope)
            return f"{called}()" if called else scope.get(ast.unparse(node))
        if isinstance(node, ast.Await):
            return self._path(node.value, scope)
        return None

    def _call(self, node: ast.Call) -> Call:
        whole = not any(isinstance(a, ast.Starred) for a in node.args)
        positional = sum(not isinstance(a, ast.Starred) for a in node.args)
        call = Call(positional, tuple(k.arg for k in node.keywords if k.arg), whole)
        for keyword in node.keywords:
            if keyword.arg is None:
                keys = tuple(sorted(set(self._keys(keyword.value)) - set(call.keywords)))
                call = replace(call, keywords=call.keywords + keys, whole=False)
        return call

    def _keys(self, node: ast.AST) -> Iterator[str]:
        """Yield the keys that a dictionary gets here: as literals, by `d["key"] =`, `d |=`."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            around, self._around = self._around, self._functions.get(node.func.id) or ast.Pass()
            for inner in ast.walk(self._around):
                if isinstance(inner, ast.Return) and inner.value:
                    yield from self._keys(inner.value)
            self._around = around
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    yield str(key.value)
                elif key is None:
                    yield from self._keys(value)
        elif isinstance(node, ast.IfExp):
            yield from (*self._keys(node.body), *self._keys(node.orelse))
        elif isinstance(node, ast.Name):
            own = list(self._assigned_keys(node.id, list(ast.walk(self._around))))
            yield from own or self._assigned_keys(node.id, self._tree.body)

    def _assigned_keys(self, name: str, nodes: Sequence[ast.AST]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                (target, *_) = node.targets if isinstance(node, ast.Assign) else [node.target]
                if ast.unparse(target) == name and node.value is not None:
                    yield from self._keys(node.value)
                elif ast.unparse(getattr(target, "value", target)) == name:
                    key = getattr(target, "slice", None)
                    if isinstance(key, ast.Constant):
                        yield str(key.value)


def _declared(node: ast.AST) -> list[str]:
    """Return the members that a statement of a class declares."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [str(getattr(t, "attr", "") or getattr(t, "id", "")) for t in targets]
