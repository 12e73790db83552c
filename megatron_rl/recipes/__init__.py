"""Recipes: values of the configuration under a name, from YAML files in this folder.

    summary: one line
    source: paper, section                origin of the values
    notes: text                           differences from the paper (optional)
    inferred: {algorithm.truncated: why}  values that the source implies but does not print
    choices: {optimizer.eps: why}         values on which the source says nothing
    base: scalerl                         recipe that these values override (optional)
    values: {algorithm: {...}, ...}       as in a configuration file
    variants:                             derived recipes, named <file>-<variant>
      loo-fp32: {summary: ..., values: {...}}

All other values are printed in the source. A recipe takes over what its base infers and chooses
for the keys that it does not set itself.

`recipe: dapo` in a configuration file, or `--recipe dapo`, takes the recipe's values as its base;
so does the path of another file in this format, without variants: `--recipe my_recipe.yaml`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.section import ConfigError, read_yaml

FOLDER = Path(__file__).parent
VARIANT_KEYS = {"summary", "values", "notes", "source", "inferred", "choices"}
KEYS = VARIANT_KEYS | {"base", "variants"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe, with the values of its bases."""

    name: str = ""
    summary: str = ""
    source: str = ""
    notes: str = ""
    base: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    inferred: dict[str, str] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)


def names() -> list[str]:
    """List all recipes: each file, followed by its variants."""
    return list(_entries())


def load(name: str) -> Recipe:
    """Load the recipe of this name, or of this file (`.yaml`).

    Raises:
        ConfigError: no such recipe, a malformed file, or a key of `inferred` or `choices` that has
            no value in the recipe.
    """
    entries = _entries()
    if name.endswith(".yaml") and Path(name).is_file():
        entries = {**entries, name: _read(Path(name), KEYS - {"variants"})}
    if name not in entries:
        raise ConfigError(f"recipe is {name!r}: no such recipe; there are {', '.join(entries)}")
    own = Recipe(name, **{k: v for k, v in entries[name].items() if v and k != "variants"})
    base = load(own.base) if own.base else Recipe()
    values = merge(base.values, own.values)
    keys, given = dict(flatten(values)).keys(), {**own.inferred, **own.choices}.keys()
    if unknown := sorted(given - keys):
        raise ConfigError(f"recipe {name}: {unknown} of inferred or choices have no value in it")
    above = keys - given - dict(flatten(own.values)).keys()
    return replace(
        own,
        source=own.source or base.source,
        values=values,
        inferred={k: v for k, v in base.inferred.items() if k in above} | own.inferred,
        choices={k: v for k, v in base.choices.items() if k in above} | own.choices,
    )


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`, mapping by mapping.

    A choice (a mapping with `kind`) of another kind replaces the one in `base`, because parameters
    belong to their kind.

    Example: `{loss: {kind: cispo, max_ratio: 4}}` under `{loss: {kind: gspo}}` is `{loss: {kind:
    gspo}}`, and under `{loss: {max_ratio: 8}}` is `{loss: {kind: cispo, max_ratio: 8}}`.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(value, str) and isinstance(old, dict) and "kind" in old:
            value = {"kind": value}
        if value is None and isinstance(old, dict):
            continue  # a section without a key
        if isinstance(value, dict) and isinstance(old, dict):
            same_kind = value.get("kind", old.get("kind")) == old.get("kind", value.get("kind"))
            merged[key] = merge(old, value) if same_kind else value
        else:
            merged[key] = value
    return merged


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested values; an empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@cache
def _entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for path in sorted(FOLDER.glob("*.yaml"), key=lambda p: (p.stem != "scalerl", p.stem)):
        entries[path.stem] = entry = _read(path, KEYS)
        for variant, derived in (entry.get("variants") or {}).items():
            _check(f"{path.name}, variant {variant}", derived, VARIANT_KEYS, {"summary", "values"})
            entries[f"{path.stem}-{variant}"] = {**derived, "base": path.stem}
    return entries


def _read(path: Path, allowed: set[str]) -> dict[str, Any]:
    entry: dict[str, Any] = read_yaml(path)
    _check(path.name, entry, allowed, {"summary", "source", "values"})
    return entry


def _check(name: str, entry: Any, allowed: set[str], required: set[str]) -> None:
    given = set(entry) if isinstance(entry, dict) else set()
    if given - allowed or required - given:
        raise ConfigError(
            f"recipe {name}: keys {sorted(given)}; required are {sorted(required)}, allowed are"
            f" {sorted(allowed)}"
        )
