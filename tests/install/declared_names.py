"""The names and parameters that the modules of a release declare, from their syntax trees.

A path such as `vllm.AsyncLLM.from_args().abort` is followed through imports, classes and their
bases, attributes and, at `()`, the declared result of a call. Where the sources do not say what an
object is, its attributes and parameters are taken for present.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.install.release_files import Read

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ROOT_CLASSES = {"object", "ABC", "Generic", "Protocol", "Enum", "str", "int"}
_NO_VALUE = ast.Constant(None)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A node of a module; `owner` is the class that has it as a member."""

    module: str
    node: ast.AST
    owner: ast.ClassDef | None = None
    function: ast.AST | None = None
    """Where a statement of a class is in one of its functions."""


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments: the number of positional ones, the keywords; `whole` if there are no others."""

    positional: int
    keywords: tuple[str, ...]
    whole: bool


OPAQUE = Declaration("", _NO_VALUE)
"""An object of which the sources do not say what it is."""


class Release:
    """Modules of a release, parsed when they are first needed."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.module = cache(self._module)
        self.names = cache(self._names)

    def _module(self, name: str) -> ast.Module | None:
        base = name.replace(".", "/")
        for path in (f"{base}/__init__.py", f"{base}.py", f"{base}.pyi", f"{base}/__init__.pyi"):
            text = self._read(path)
            if text is not None:
                return ast.parse(text)
        return None

    def _names(self, module: str) -> dict[str, list[ast.AST]]:
        names: dict[str, list[ast.AST]] = {}
        tree = self.module(module)
        for node in _statements(tree.body if tree else []):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    names.setdefault(bound, []).append(node)
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.setdefault(node.name, []).append(node)
            else:
                for target in _targets(node):
                    if isinstance(target, ast.Name):
                        names.setdefault(target.id, []).append(node)
        return names

    def _is_stub(self, module: str) -> bool:
        base = module.replace(".", "/")
        sources = (f"{base}.py", f"{base}/__init__.py")
        return all(self._read(source) is None for source in sources)

    def problem(self, path: str, call: Call | None = None) -> str:
        """Return why a use of a path is wrong; empty if it is right."""
        parts = path.removesuffix("().__init__").split(".")
        split = len(parts)
        while split and self.module(".".join(parts[:split])) is None:
            split -= 1
        if not split:
            return f"there is no module {parts[0]}"
        known = [Declaration(".".join(parts[:split]), _NO_VALUE)]
        for i, part in enumerate(parts[split:], split):
            known = self._step(known, part)
            if not known:
                return f"{'.'.join(parts[:i])} has no {part.removesuffix('()')}"
        return self._refusal(known, call) if call else ""

    def _step(self, known: list[Declaration], part: str) -> list[Declaration]:
        name = part.removesuffix("()")
        members = [m for k in known for m in self._members(k, name)]
        if not part.endswith("()"):
            return members
        return [r for m in members for r in self._results(m)]

    def _members(self, of: Declaration, name: str) -> list[Declaration]:
        if of is OPAQUE or name.startswith("__"):
            return [OPAQUE]
        if isinstance(of.node, ast.ClassDef):
            return list(self._class_members(of, name))
        if of.node is _NO_VALUE:
            return self._module_members(of.module, name)
        if isinstance(of.node, _FUNCTIONS):
            results = self._results(of) if of.owner and _is_property(of.node) else []
            return [m for r in results for m in self._members(r, name)]
        return [OPAQUE]

    def _module_members(self, module: str, name: str) -> list[Declaration]:
        if self.module(f"{module}.{name}"):
            return [Declaration(f"{module}.{name}", _NO_VALUE)]
        members = []
        for node in self.names(module).get(name, []):
            if isinstance(node, ast.Import | ast.ImportFrom):
                members += self._imported(module, node, name)
            else:
                members += self._value(Declaration(module, node))
        if members:
            return members
        stars = [n for n in self.names(module).get("*", []) if isinstance(n, ast.ImportFrom)]
        return [m for n in stars for m in self._module_members(self._base(module, n), name)]

    def _base(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        is_package = self._read(f"{module.replace('.', '/')}/__init__.py") is not None
        package = package[: len(package) - node.level + is_package]
        return ".".join([*package, *([node.module] if node.module else [])])

    def _imported(
        self, module: str, node: ast.Import | ast.ImportFrom, name: str
    ) -> list[Declaration]:
        if isinstance(node, ast.Import):
            (alias,) = (a for a in node.names if (a.asname or a.name.partition(".")[0]) == name)
            target = alias.name if alias.asname else name
            return [Declaration(target, _NO_VALUE)] if self.module(target) else [OPAQUE]
        (alias,) = (a for a in node.names if (a.asname or a.name) == name)
        base = self._base(module, node)
        if self.module(base) is None or base == module:
            return [OPAQUE]
        return self._module_members(base, alias.name)

    def _value(self, declared: Declaration) -> list[Declaration]:
        """Follow an assignment to the object that it names."""
        node = declared.node
        if isinstance(node, ast.AnnAssign) and declared.owner is not None:
            return self._instances(declared.module, node.annotation)
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            return [declared]
        arguments = getattr(declared.function, "args", None)
        for argument in [*arguments.args, *arguments.kwonlyargs] if arguments else []:
            if isinstance(node.value, ast.Name) and argument.arg == node.value.id:
                return self._instances(declared.module, argument.annotation)
        return self._expression(declared.module, node.value) or [OPAQUE]

    def _expression(self, module: str, node: ast.AST | None) -> list[Declaration]:
        if isinstance(node, ast.Name):
            return self._module_members(module, node.id)
        if isinstance(node, ast.Attribute):
            of = self._expression(module, node.value)
            return [m for o in of for m in self._members(o, node.attr)]
        if isinstance(node, ast.Call):
            return [r for f in self._expression(module, node.func) for r in self._results(f)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self._expression(module, ast.parse(node.value, mode="eval").body)
        return []

    def _instances(self, module: str, annotation: ast.AST | None) -> list[Declaration]:
        """Return the classes of an annotation, as instances; opaque unless it is one class."""
        classes = self._expression(module, annotation)
        if not classes or not all(isinstance(c.node, ast.ClassDef) for c in classes):
            return [OPAQUE]
        return classes

    def _lineage(self, of: Declaration) -> Iterator[Declaration]:
        """Yield a class and its bases, opaque ones too, in the order of look-up."""
        yield of
        assert isinstance(of.node, ast.ClassDef)
        for base in of.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            declared = self._expression(of.module, base)
            known = declared and OPAQUE not in declared
            if not known and ast.unparse(base).rpartition(".")[2] not in _ROOT_CLASSES:
                yield OPAQUE
            for d in declared:
                if isinstance(d.node, ast.ClassDef):
                    yield from self._lineage(d)

    def _class_members(self, of: Declaration, name: str) -> Iterator[Declaration]:
        for cls in self._lineage(of):
            if cls is OPAQUE:
                yield OPAQUE
                return
            assert isinstance(cls.node, ast.ClassDef)
            own = [
                Declaration(cls.module, node, cls.node, function)
                for node, function in _own_members(cls.node).get(name, ())
            ]
            if own:
                for member in own:
                    yield from self._value(member)
                return
            if self._is_stub(cls.module):
                yield OPAQUE  # of a compiled class, and stubs leave members out
                return

    def _results(self, of: Declaration) -> list[Declaration]:
        if isinstance(of.node, ast.ClassDef):
            return [of]
        if not isinstance(of.node, _FUNCTIONS):
            return [OPAQUE]
        annotation = of.node.returns
        if of.owner and annotation is not None and ast.unparse(annotation).strip("'\"") == "Self":
            return [Declaration(of.module, of.owner)]
        return self._instances(of.module, annotation)

    def _refusal(self, known: list[Declaration], call: Call) -> str:
        """Return why no declaration takes these arguments; empty if one does."""
        refusal = ""
        for declared in known:
            for signature in self._signatures(declared):
                if signature is None:
                    return ""
                bind = signature.bind if call.whole else signature.bind_partial
                try:
                    bind(*range(call.positional), **dict.fromkeys(call.keywords))
                except TypeError as e:
                    refusal = str(e)
                else:
                    return ""
        return refusal

    def _signatures(self, of: Declaration) -> Iterator[inspect.Signature | None]:
        if isinstance(of.node, ast.ClassDef):
            yield from self._constructors(of)
        elif isinstance(of.node, _FUNCTIONS) and not _is_property(of.node):
            bound = of.owner is not None and "staticmethod" not in _decorators(of.node)
            yield _signature(of.node.args, bound)
        else:
            yield None

    def _constructors(self, of: Declaration) -> Iterator[inspect.Signature | None]:
        fields: dict[str, bool] = {}
        is_dataclass = "dataclass" in _decorators(of.node)
        for cls in self._lineage(of):
            if cls is OPAQUE and not fields:
                yield None
                return
            if is_dataclass and "dataclass" not in _decorators(cls.node):
                continue
            made = [
                Declaration(cls.module, n, of.node)
                for n in getattr(cls.node, "body", [])
                if isinstance(n, _FUNCTIONS) and n.name == "__init__"
            ]
            if made:
                for function in made:
                    yield from self._signatures(function)
                return
            own = {
                ast.unparse(n.target): n.value is None
                for n in getattr(cls.node, "body", [])
                if isinstance(n, ast.AnnAssign)
            }
            fields = own | {n: required for n, required in fields.items() if n not in own}
        yield _of_fields(fields)


def _of_fields(fields: dict[str, bool]) -> inspect.Signature:
    """Return the constructor of a dataclass, or of a class like one (pydantic, msgspec)."""
    flags = list(fields.values())
    in_order = flags == sorted(flags, reverse=True)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if in_order else inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(n, kind, default=inspect.Parameter.empty if required else None)
            for n, required in fields.items()
        ]
    )


def _signature(arguments: ast.arguments, bound: bool) -> inspect.Signature:
    kinds = inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    parameters = [
        kinds(
            argument.arg,
            kinds.POSITIONAL_ONLY
            if i < len(arguments.posonlyargs)
            else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if i < first_default else None,
        )
        for i, argument in enumerate(plain)
    ][bound:]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = kinds.empty if default is None else None
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=value))
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, those under `if`, `try` and `with` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for inner in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, inner, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [e for t in node.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def _decorators(node: ast.AST) -> str:
    return " ".join(ast.unparse(d) for d in getattr(node, "decorator_list", []))


def _is_property(node: ast.AST) -> bool:
    return "property" in _decorators(node)


@cache
def _own_members(node: ast.ClassDef) -> dict[str, list[tuple[ast.AST, ast.AST | None]]]:
    """Return the members of a class, and assignments to `self.x` with the function around them."""
    members: dict[str, list[tuple[ast.AST, ast.AST | None]]] = {}
    for statement in _statements(node.body):
        members.setdefault(_member_name(statement), []).append((statement, None))
        if isinstance(statement, _FUNCTIONS):
            for inner in ast.walk(statement):
                if any(_is_of_self(t) for t in _targets(inner)):
                    members.setdefault(_member_name(inner), []).append((inner, statement))
    return members


def _is_of_self(target: ast.AST) -> bool:
    base = getattr(target, "value", None)
    return isinstance(target, ast.Attribute) and isinstance(base, ast.Name) and base.id == "self"


def _member_name(node: ast.AST) -> str:
    targets = _targets(node)
    if targets:
        return str(getattr(targets[0], "attr", "") or getattr(targets[0], "id", ""))
    return str(getattr(node, "name", ""))
