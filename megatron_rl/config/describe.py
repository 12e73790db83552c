"""List every key of the configuration with its type, default and meaning."""

from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron_rl.config.run import RunConfig
from megatron_rl.section import Section, entries_of, kind_of, sections_of

_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def describe(
    section: type[Section] = RunConfig, prefix: str = "", skip: str = ""
) -> list[tuple[str, str, str, str]]:
    """List the leaf keys of the tree as (dotted key, type, default, help text).

    The parameters of a choice are listed for each kind that has them, with the kind in brackets
    before the help text.
    """
    rows = []
    for name, field in section.model_fields.items():
        if name == skip:
            continue
        key, kind = prefix + name, field.annotation
        text = " ".join((field.description or "").split())
        inner, entries = sections_of(kind), entries_of(kind)
        key += ".<name>" if entries else ""
        if len(entries) == 1:
            rows += describe(entries[0], f"{key}.")
        elif choices := entries or (inner if len(inner) > 1 else ()):
            default = "the name" if entries else repr(field.default.kind)
            rows.append((f"{key}.kind", ", ".join(map(kind_of, choices)), default, text))
            for choice in choices:
                leaves = describe(choice, f"{key}.", skip="kind")
                rows += [(k, t, d, f"[{kind_of(choice)}] {h}") for k, t, d, h in leaves]
        elif inner:
            rows += describe(inner[0], f"{key}.")
        else:
            value = field.get_default(call_default_factory=True, validated_data={})
            value = str(value) if isinstance(value, Path) else value
            default = "required" if field.is_required() else repr(value)
            rows.append((key, type_text(kind, field.metadata), default, text))
    return rows


def type_text(kind: Any, constraints: Iterable[Any] = ()) -> str:
    """Format a type for a writer of YAML: `int > 0`, `float | None`, `'phrase' | 'none'`.

    The constraints are bounds and other metadata that pydantic checks.
    """
    inner, origin = get_args(kind), get_origin(kind)
    if origin is Annotated:
        return type_text(inner[0], inner[1:])
    if origin is Literal:
        text = " | ".join(repr(value) for value in inner)
    elif origin in (Union, UnionType):
        text = " | ".join(type_text(member) for member in inner)
    elif origin is not None:
        parts = ["..." if member is Ellipsis else type_text(member) for member in inner]
        text = f"{origin.__name__}[{', '.join(parts)}]"
    else:
        text = "None" if kind is NoneType else getattr(kind, "__name__", str(kind))
    flat = [x for c in constraints for x in (c.metadata if isinstance(c, FieldInfo) else [c])]
    limits = [(sign, getattr(x, name, None)) for x in flat for name, sign in _BOUNDS.items()]
    bounds = " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)
    return f"{text} {bounds}".rstrip()
