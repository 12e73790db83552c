"""From a recipe, a YAML file and command-line overrides to a checked configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from megatron_rl import recipes
from megatron_rl.algorithm.settings import DEFAULT_KINDS
from megatron_rl.config.describe import describe
from megatron_rl.config.run import RunConfig
from megatron_rl.config.tasks import task_arguments
from megatron_rl.section import ConfigError, Section, entries_of, kind_of, sections_of

SWITCH = {"true": True, "false": False}
"""What a switch may be said to be on the command line."""


def _flatten(error: ValidationError, one_task: bool) -> str:
    lines = []
    for e in error.errors():
        loc = _as_written(e["loc"], one_task)
        key = ".".join(str(part) for part in loc) or "configuration"
        message = e["msg"].removeprefix("Value error, ")
        if e["type"] == "extra_forbidden":
            lines.append(
                f"{key}: unknown key (value {e['input']!r}); {_known_keys(e['loc'], one_task)}"
            )
        elif e["type"] == "union_tag_invalid":
            lines.append(f"{key}.kind is {e['ctx']['tag']!r}: one of {e['ctx']['expected_tags']}")
        elif e["type"] == "missing":
            lines.append(f"{key} is missing: there is no default")
        elif e["type"] == "value_error":
            # What is refused within a task names its own field alone.
            lines.append(f"{key}.{message}" if loc[:1] in (("task",), ("tasks",)) else message)
        else:
            lines.append(f"{key} is {e['input']!r}: {message[0].lower()}{message[1:]}")
    return "\n".join(lines)


def _unrecognized(message: str) -> str:
    _, found, arguments = message.partition("unrecognized arguments: ")
    if not found:
        return f"command line: {message}"
    name, *value = arguments.split(" ")
    loc = tuple(name.lstrip("-").split("=")[0].split("."))
    given = " ".join(value) or name.partition("=")[2]
    while len(loc) > 1 and not _sections(loc[:-1]):
        loc = loc[:-1]
    return f"{'.'.join(loc)}: unknown key (value {given!r}); {_known_keys(loc)}"


def _sections(loc: tuple[int | str, ...]) -> tuple[type[Section], ...]:
    """The sections that stand at a place of the tree; of a choice, the one that `loc` names."""
    return _place(loc)[0]


def _place(loc: tuple[int | str, ...]) -> tuple[tuple[type[Section], ...], bool]:
    """The sections at a place, and whether it is a mapping whose entries they are."""
    found: tuple[type[Section], ...] = (RunConfig,)
    entries = False
    for part in loc:
        if entries:  # the name of an entry
            entries = False
            continue
        named = tuple(s for s in found if len(found) > 1 and kind_of(s) == part)
        fields = [s.model_fields[str(part)] for s in found if part in s.model_fields]
        below = [(sections_of(f.annotation), entries_of(f.annotation)) for f in fields]
        entries = not named and any(mapped for _, mapped in below)
        found = named or tuple(s for plain, mapped in below for s in (*plain, *mapped))
    return found, entries


def _without_kinds(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A place in the tree without the names of choices that pydantic puts into it."""

    def is_kind(i: int) -> bool:
        above, entries = _place(loc[:i])
        return not entries and len(above) > 1 and loc[i] in map(kind_of, above)

    return tuple(part for i, part in enumerate(loc) if not is_kind(i))


def _as_written(loc: tuple[int | str, ...], one_task: bool) -> tuple[int | str, ...]:
    """A place by the keys of the file: without kinds, and `task` where it is the only one."""
    plain = _without_kinds(loc)
    return ("task", *plain[2:]) if one_task and plain[:1] == ("tasks",) else plain


def _known_keys(loc: tuple[int | str, ...], one_task: bool = False) -> str:
    above = _sections(loc[:-1])
    where = ".".join(str(part) for part in _as_written(loc[:-1], one_task)) or "the top level"
    of_kind = loc[-2:-1] and loc[-2] in map(_kind_or_none, above)
    kind = f" of kind {kind_of(above[0])}" if of_kind else ""
    known = dict.fromkeys(name for section in above for name in section.model_fields)
    return f"{where}{kind} has: {', '.join(known)}"


def _kind_or_none(section: type[Section]) -> Any:
    return kind_of(section) if "kind" in section.model_fields else None


def _read_yaml(path: str | Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}: not valid YAML: {e}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(values).__name__}")
    return values


def _read_overrides(overrides: list[str]) -> dict[str, Any]:
    class _Settings(RunConfig, BaseSettings):
        model_config = SettingsConfigDict(
            extra="forbid",
            use_attribute_docstrings=True,
            cli_prog_name="megatron-rl train",
            cli_implicit_flags=True,
            cli_exit_on_error=False,
        )

    split = [part for argument in overrides for part in _split_value(argument)]
    others, tasks = task_arguments(split)
    try:
        source = CliSettingsSource(_Settings, cli_parse_args=_command_line(others))  # type: ignore[var-annotated]
        return {**source(), **tasks}
    except SettingsError as e:
        raise ConfigError(_unrecognized(str(e))) from None


def _command_line(overrides: list[str]) -> list[str]:
    """The overrides as pydantic-settings reads them.

    `--algorithm.loss gspo` becomes `--algorithm.loss.kind gspo`, so that parameters may follow;
    a switch may have its value said, `--resume true` or `--resume=false`.
    """
    keys = {f"--{key}": kind for key, kind, *_ in describe()}
    choices = {key.removesuffix(".kind") for key in keys if key.endswith(".kind")}
    out: list[str] = []
    pending = list(overrides)
    while pending:
        name = pending.pop(0)
        if keys.get(name) == "bool" and pending and pending[0].lower() in SWITCH:
            on = SWITCH[pending.pop(0).lower()]
            out.append(name if on else name.replace("--", "--no-", 1))
        else:
            out.append(f"{name}.kind" if name in choices else name)
    return out


def _split_value(argument: str) -> list[str]:
    return argument.split("=", 1) if argument.startswith("--") else [argument]


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> RunConfig:
    """The configuration of a recipe, with a YAML file on top, and command-line overrides on that.

    Args:
        path: YAML file, or None for the defaults; its key `recipe` names the recipe.
        overrides: `["--schedule.steps", "40", "--model=tiny_dense", "--recipe", "dapo"]`.

    Raises:
        ConfigError: unknown key, bad value, or values that don't fit together; the message names
            the key, the value and what would be right.
    """
    in_file = {} if path is None else _read_yaml(path)
    on_line = _read_overrides(overrides or [])
    recipe = on_line.get("recipe", in_file.get("recipe"))
    values: dict[str, Any] = {"algorithm": {k: {"kind": v} for k, v in DEFAULT_KINDS.items()}}
    if recipe is not None:
        values = recipes.merge(values, recipes.load(recipe).values)
    for layer in (in_file, on_line):
        values = recipes.merge(values, layer)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as e:
        raise ConfigError(_flatten(e, one_task=not values.get("tasks"))) from None
