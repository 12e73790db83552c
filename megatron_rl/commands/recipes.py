"""`megatron-rl recipes`: list the recipes, show the values of one, and what tells two apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Recipes: lists them; `show NAME` and `diff A B` print values.",
)

Name = Annotated[str, typer.Argument(help="Name of a recipe (`megatron-rl recipes`).")]


@app.callback(invoke_without_command=True)
def list_recipes(context: typer.Context) -> None:
    """List every recipe with what it is."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    from megatron_rl import recipes

    table = Table("recipe", "what it is", header_style="bold")
    for name in recipes.names():
        table.add_row(name, recipes.load(name).summary)
    Console().print(table)


@app.command()
def show(
    name: Name,
    every: Annotated[
        bool, typer.Option("--all", help="All keys, those of the machine and the task too.")
    ] = False,
) -> None:
    """Print the values of a recipe, its bases and the defaults resolved, as YAML."""
    from megatron_rl import recipes

    recipe = recipes.load(name)
    print(f"# {recipe.name}: {recipe.summary}")
    print(f"# source: {recipe.source}")
    if recipe.notes:
        print(f"# notes: {recipe.notes}")
    if recipe.base:
        print(f"# on top of: {recipe.base}")
    print(as_yaml(resolved(name) if every else of_recipe(resolved(name))), end="")


@app.command()
def diff(a: Name, b: Name) -> None:
    """Print the values in which two recipes differ."""
    from rich.console import Console
    from rich.table import Table

    table = Table("key", a, b, header_style="bold")
    for key, one, other in differences(resolved(a), resolved(b)):
        table.add_row(key, one, other)
    Console().print(table)


RECIPE_SECTIONS = ("algorithm", "schedule", "generation", "optimizer", "precision")
"""What a recipe is about; the other sections are of the machine, the task and the run."""


def resolved(name: str) -> dict[str, Any]:
    """The whole configuration of a recipe, as plain values.

    Raises:
        ConfigError: no such recipe.
    """
    from megatron_rl.config import load_config

    return _plain(load_config(None, ["--recipe", name]))


def of_recipe(values: dict[str, Any]) -> dict[str, Any]:
    """The sections that a recipe is about."""
    return {key: values[key] for key in RECIPE_SECTIONS}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(dotted key, value in a, value in b) where they differ; `-` for a key that one lacks."""
    one, other = _flat(a), _flat(b)
    keys = list(dict.fromkeys([*one, *other]))
    pairs = [(key, one.get(key, "-"), other.get(key, "-")) for key in keys]
    return [(k, str(x), str(y)) for k, x, y in pairs if x != y and k != "recipe"]


def as_yaml(values: dict[str, Any]) -> str:
    """A configuration file with these values."""
    import yaml

    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=100)


def _plain(config: BaseModel) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out
