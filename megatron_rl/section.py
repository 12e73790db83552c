"""Base class of the sections of the configuration; imports nothing of this package."""

import types
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, the value and the remedy."""


class Section(BaseModel):
    """One mapping of the tree: typed, documented fields; unknown keys are errors.

    A section with a field `kind` is one of several alternatives (a discriminated union); its other
    fields are the parameters of that kind.
    """

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def sections_of(annotation: Any) -> tuple[type[Section], ...]:
    """Return the sections of a field: one, several alternatives, or () for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    if get_origin(annotation) is Annotated:
        return sections_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = [sections_of(member) for member in get_args(annotation)]
        return tuple(s for member in members for s in member) if all(members) else ()
    return ()


def entries_of(annotation: Any) -> tuple[type[Section], ...]:
    """Return the alternatives for the entries of a mapping, or () for any other field."""
    return sections_of(get_args(annotation)[1]) if get_origin(annotation) is dict else ()


def with_kind(value: Any, default: str) -> Any:
    """Complete a choice that is given by its kind only, or without a kind."""
    if isinstance(value, str):
        return {"kind": value}
    if isinstance(value, dict) and "kind" not in value:
        return {"kind": default, **value}
    return value


def kind_of(section: type[Section]) -> Any:
    """Return the kind of a section that is one of several alternatives."""
    return section.model_fields["kind"].default
