"""From a recipe, a YAML file and command-line overrides to a checked configuration.

A run keeps its configuration in its folder as `config.yaml`, a file like any other. It has every
key, so that it means the same when defaults change.
"""

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_rl import recipes
from megatron_rl.algorithm.settings import DEFAULT_KINDS
from megatron_rl.config.describe import describe
from megatron_rl.config.run import RunConfig
from megatron_rl.files import replace_file
from megatron_rl.section import (
    ConfigError,
    Section,
    TextLoader,
    entries_of,
    kind_of,
    read_yaml,
    sections_of,
)

CONFIG_FILE = "config.yaml"
Location = tuple[int | str, ...]


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> RunConfig:
    """Load a configuration: a recipe, under a YAML file, under command-line overrides.

    Without a path, the file is empty. The key `recipe` of the file or the overrides names the
    recipe: `["--schedule.steps", "40", "--model=tiny_dense", "--recipe", "dapo"]`.

    Raises:
        ConfigError: unknown key, bad value, or values that do not fit together; the message names
            the key, the value and the remedy.
    """
    file = ({} if path is None else read_yaml(path)) or {}
    if not isinstance(file, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(file).__name__}")
    command_line = parse_overrides(overrides or [])
    recipe = command_line.get("recipe", file.get("recipe"))
    values: dict[str, Any] = {"algorithm": {k: {"kind": v} for k, v in DEFAULT_KINDS.items()}}
    if recipe is not None:
        values = recipes.merge(values, recipes.load(str(recipe)).values)
    for layer in (file, command_line):
        values = recipes.merge(values, layer)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as e:
        raise ConfigError(_message(e, one_task=not values.get("tasks"))) from None


def save_config(config: RunConfig) -> Path:
    """Write the configuration into the run's folder, atomically."""
    # `resume` belongs to one start of a run, not to the run.
    values = config.model_dump(mode="json", exclude={"resume"})
    path = config.output_dir / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, yaml.safe_dump(values, sort_keys=False, width=100, allow_unicode=True))
    return path


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """Parse dotted options into nested values; text stays text until it is validated.

    Example: `["--seed", "3", "--resume", "--algorithm.loss=gspo", "--algorithm.loss.min_ratio",
    "0.9"]` gives `{"seed": "3", "resume": True, "algorithm": {"loss": {"kind": "gspo",
    "min_ratio": "0.9"}}}`.

    Raises:
        ConfigError: an argument that is no option, an option without a value, or a key under one
            that has a value already.
    """
    types = {key: kind for key, kind, *_ in describe()}
    values: dict[str, Any] = {}
    pending, name, kind, value = list(arguments), "", "", None
    while pending:
        word = pending.pop(0)
        if not word.startswith("--"):
            remedy = "use --KEY VALUE"
            if kind.startswith("tuple") and isinstance(value, list):
                remedy = f"write the values as one: --{name} {','.join([*value, word])}"
            raise ConfigError(f"command line: {word} is not an option; {remedy}")
        name, equals, text = word.partition("=")
        negated = name.startswith("--no-")
        name = name.removeprefix("--no-" if negated else "--")
        kind = types.get(re.sub(r"^(task|tasks\.[^.]*)\.", "tasks.<name>.", name), "")
        value = not negated
        if not negated and (equals or (pending and not pending[0].startswith("--"))):
            value = _parse_value(text if equals else pending.pop(0), kind)
        elif not kind.startswith("bool"):
            raise ConfigError(f"command line: --{name} needs a value")
        *parents, last = name.split(".")
        into = values
        for part in parents:
            below = into.setdefault(part, {})
            if isinstance(below, str):  # a choice given by its kind
                below = into[part] = {"kind": below}
            if not isinstance(below, dict):
                raise ConfigError(f"command line: --{name}: {part} is {below!r} already")
            into = below
        if isinstance(into.get(last), dict) and isinstance(value, str):
            into[last]["kind"] = value
        else:
            into[last] = value
    return values


def _parse_value(text: str, kind: str) -> Any:
    """Parse null, lists and mappings; any other text is converted by the type of the field."""
    if text in ("null", "None") and (not kind or "None" in kind):
        return None
    if kind.startswith("tuple"):
        text = text.strip(" ()[]")
        words = text.split(",") if "str" in kind else text.replace(",", " ").split()
        return [word.strip(" '\"") for word in words if word.strip()]
    if kind.startswith("str") or text[:1] not in ("[", "{"):
        return text
    try:
        return yaml.load(text, TextLoader)
    except yaml.YAMLError:
        return text  # validation reports it


def _message(error: ValidationError, one_task: bool) -> str:
    """Format all errors, one per line, with keys as they are written in the file."""
    lines = []
    for e in error.errors():
        keys, _ = _follow(e["loc"], one_task)
        key, message = ".".join(keys) or "configuration", e["msg"].removeprefix("Value error, ")
        value = repr(e["input"])
        if e["type"] == "extra_forbidden":
            above, sections = _follow(e["loc"][:-1], one_task)
            where = ".".join(above) or "the top level"
            if len(sections) == 1 and "kind" in sections[0].model_fields:
                where += f" of kind {kind_of(sections[0])}"
            known = dict.fromkeys(name for section in sections for name in section.model_fields)
            lines.append(f"{key}: unknown key (value {value}); {where} has: {', '.join(known)}")
        elif e["type"] == "union_tag_invalid":
            lines.append(f"{key}.kind is {e['ctx']['tag']!r}: one of {e['ctx']['expected_tags']}")
        elif e["type"] == "missing":
            lines.append(f"{key} is missing: there is no default")
        elif e["type"] == "value_error":
            # Messages of RunConfig have full keys, those of a task only the name of the field.
            lines.append(f"{key}.{message}" if keys[:1] in (["task"], ["tasks"]) else message)
        else:
            hint = "; write it as [1, 2]" if e["type"] == "tuple_type" else ""
            lines.append(f"{key} is {value}: {message[0].lower()}{message[1:]}{hint}")
    return "\n".join(lines)


def _follow(location: Location, one_task: bool) -> tuple[list[str], tuple[type[Section], ...]]:
    """Return (keys, sections) at pydantic's location of an error.

    The keys are those of the file: without the kinds of choices, and `task` for the only task.
    """
    keys: list[str] = []
    sections: tuple[type[Section], ...] = (RunConfig,)
    is_mapping = False
    for part in location:
        if not is_mapping and len(sections) > 1 and part in map(kind_of, sections):
            sections = tuple(s for s in sections if kind_of(s) == part)
            continue
        keys.append(str(part))
        if is_mapping:  # `part` is the name of an entry
            is_mapping = False
            continue
        types = [s.model_fields[str(part)].annotation for s in sections if part in s.model_fields]
        is_mapping = any(entries_of(t) for t in types)
        sections = tuple(s for t in types for s in (*sections_of(t), *entries_of(t)))
    return ["task", *keys[2:]] if one_task and keys[:1] == ["tasks"] else keys, sections
