"""Base class of the sections of the configuration, and its files; imports no other module here."""

import contextlib
import json
import os
import re
import types
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from yaml.composer import ComposerError

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

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, values: Any) -> Any:
        """Leave out sections without a key, and put the home directory for `~/`."""
        if not isinstance(values, dict):
            return values
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        sections = {name for name, kind in kinds.items() if sections_of(kind) or entries_of(kind)}
        return {k: _home(v) for k, v in values.items() if v is not None or k not in sections}


def _home(value: Any) -> Any:
    if isinstance(value, list):
        return [_home(each) for each in value]
    is_path = isinstance(value, str) and re.match(r"~[\w-]*/", value)
    return os.path.expanduser(value) if is_path else value


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


class TextLoader(yaml.SafeLoader):
    """YAML in which a plain scalar is text or null, and no key occurs twice.

    The field decides on the type, as on the command line: `off`, `2024-01-01` and `0123` stay text.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping; `ComposerError`, with the line, for a key that it has already."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys: list[Any] = []
        for key, _ in node.value:
            if key.value in keys:
                problem = f"the key {key.value!r} occurs twice"
                raise ComposerError(None, None, problem, key.start_mark)
            keys.append(key.value)
        return node


TextLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(path: str | Path) -> Any:
    """Read a file of the configuration, in UTF-8 or UTF-16 with its mark; scalars stay text.

    Raises:
        ConfigError: no such file, or not valid YAML.
    """
    try:
        return yaml.load(Path(path).read_bytes(), TextLoader)
    except OSError as e:
        raise ConfigError(f"{path}: no such configuration file: {e.strerror}") from None
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}: not valid YAML: {e}") from None


def typed(value: Any) -> Any:
    """Read numbers, true, false and null in texts without a declared type, at any depth."""
    if isinstance(value, dict):
        return {key: typed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [typed(each) for each in value]
    if isinstance(value, str):
        word = {"True": "true", "False": "false", "None": "null"}.get(value, value)
        with contextlib.suppress(ValueError):
            return json.loads(word, parse_constant=str)
    return value
