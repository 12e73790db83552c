"""Every key of the configuration with its type, default and meaning."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron_rl.config.run import RunConfig
from megatron_rl.section import Section, entries_of, kind_of, sections_of

_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def describe(
    section: type[Section] = RunConfig, prefix: str = "", skip: str = ""
) -> list[tuple[str, str, str, str]]:
    """Every leaf key of the tree as (dotted key, type, default, help text).

    The parameters of a choice are listed for each kind that has them, with its name before the
    help text.
    """
    rows = []
    for name, field in section.model_fields.items():
        if name == skip:
            continue
        kind: Any = field.annotation
        default = (
            "required"
            if field.is_required()
            else repr(field.get_default(call_default_factory=True, validated_data={}))
        )
        inner = sections_of(kind)
        if entries := entries_of(kind):
            kinds, text = ", ".join(kind_of(s) for s in entries), field.description or ""
            rows.append((f"{prefix}{name}.<name>.kind", kinds, "the name", text))
            for one in entries:
                leaves = describe(one, f"{prefix}{name}.<name>.", skip="kind")
                rows += [(k, t, d, f"[{kind_of(one)}] {h}") for k, t, d, h in leaves]
            continue
        if len(inner) > 1:
            kinds = ", ".join(kind_of(s) for s in inner)
            text = field.description or ""
            rows.append((f"{prefix}{name}.kind", kinds, repr(field.default.kind), text))
            for one in inner:
                leaves = describe(one, f"{prefix}{name}.", skip="kind")
                rows += [(k, t, d, f"[{kind_of(one)}] {h}") for k, t, d, h in leaves]
            continue
        if inner:
            rows += describe(inner[0], f"{prefix}{name}.")
            continue
        shown = type_text(kind, field.metadata)
        rows.append((prefix + name, shown, default, field.description or ""))
    return rows


def type_text(kind: Any, constraints: Iterable[Any] = ()) -> str:
    """A type as someone reads it who writes YAML: `int > 0`, `float | None`, `'phrase' | 'none'`.

    Args:
        kind: annotation.
        constraints: what pydantic checks beside it.
    """
    inner = get_args(kind)
    origin = get_origin(kind)
    if origin is Annotated:
        return type_text(inner[0], inner[1:])
    if origin is Literal:
        text = " | ".join(repr(value) for value in inner)
    elif origin in (Union, UnionType):
        text = " | ".join(type_text(one) for one in inner)
    elif origin is not None:
        parts = ["..." if one is Ellipsis else type_text(one) for one in inner]
        text = f"{origin.__name__}[{', '.join(parts)}]"
    else:
        text = "None" if kind is NoneType else getattr(kind, "__name__", str(kind))
    return " ".join([text, " and ".join(_bounds(constraints))]).rstrip()


def _bounds(constraints: Iterable[Any]) -> list[str]:
    found = []
    for one in constraints:
        if isinstance(one, FieldInfo):
            found += _bounds(one.metadata)
        found += [
            f"{sign} {limit:g}"
            for name, sign in _BOUNDS.items()
            if (limit := getattr(one, name, None)) is not None
        ]
    return found
