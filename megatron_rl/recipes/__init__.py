"""Recipes: values of the configuration under a name, from YAML files in this folder.

    summary: one line                     what it is
    source: paper, section                where the values are from
    notes: text                           what is inferred, or differs from the paper (optional)
    base: scalerl                         recipe whose values these go on top of (optional)
    values: {algorithm: {...}, ...}       as in a configuration file
    variants:                             derived recipes, named <file>-<variant>
      loo-fp32: {summary: ..., values: {...}}

A file `my_run.yaml` with `recipe: dapo`, or `--recipe dapo`, takes a recipe's values as its base.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.section import ConfigError

FOLDER = Path(__file__).parent
KEYS = {"summary", "source", "notes", "base", "values", "variants"}
VARIANT_KEYS = {"summary", "values", "notes", "source"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe with everything that its bases give it."""

    name: str
    summary: str
    source: str
    notes: str
    base: str
    """Recipe that it is derived from; empty for none."""
    values: dict[str, Any]
    """Nested values of the configuration, bases included."""


def names() -> list[str]:
    """All recipes: each file, followed by its variants."""
    return list(_entries())


def load(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        ConfigError: no such recipe, or a file that is not one.
    """
    entries = _entries()
    if name not in entries:
        raise ConfigError(f"recipe is {name!r}: no such recipe; there are {', '.join(entries)}")
    entry = entries[name]
    base = load(entry["base"]) if entry.get("base") else None
    return Recipe(
        name=name,
        summary=entry["summary"],
        source=entry.get("source") or (base.source if base else ""),
        notes=entry.get("notes", ""),
        base=entry.get("base", ""),
        values=merge(base.values if base else {}, entry.get("values") or {}),
    )


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, mapping by mapping.

    A choice (a mapping with `kind`) of another kind replaces the one below it: parameters belong to
    the kind that they were given for.

    Example: `{loss: {kind: cispo, max_ratio: 4}}` under `{loss: {kind: gspo}}` is
    `{loss: {kind: gspo}}`, and under `{loss: {max_ratio: 8}}` is `{loss: {kind: cispo,
    max_ratio: 8}}`.
    """
    out = dict(base)
    for key, value in over.items():
        below = out.get(key)
        if isinstance(value, str) and isinstance(below, dict) and "kind" in below:
            value = {"kind": value}
        if isinstance(value, dict) and isinstance(below, dict):
            other = "kind" in value and value["kind"] != below.get("kind", value["kind"])
            out[key] = value if other else merge(below, value)
        else:
            out[key] = value
    return out


@cache
def _entries() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(FOLDER.glob("*.yaml"), key=lambda p: (p.stem != "scalerl", p.stem)):
        entry = yaml.safe_load(path.read_text())
        _check(path.name, entry, KEYS, {"summary", "source", "values"})
        found[path.stem] = entry
        for variant, derived in (entry.get("variants") or {}).items():
            _check(f"{path.name}, variant {variant}", derived, VARIANT_KEYS, {"summary", "values"})
            found[f"{path.stem}-{variant}"] = {**derived, "base": path.stem}
    return found


def _check(where: str, entry: Any, known: set[str], needed: set[str]) -> None:
    given = set(entry) if isinstance(entry, dict) else set()
    if given - known or needed - given:
        raise ConfigError(
            f"recipe {where}: keys {sorted(given)}; needed are {sorted(needed)}, known are"
            f" {sorted(known)}"
        )
