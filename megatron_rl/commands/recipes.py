"""`megatron-rl recipes`: list the recipes, show the values of one, and compare two."""

from collections.abc import Iterable
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from megatron_rl import recipes
from megatron_rl.config import load_config

app = typer.Typer(
    name="recipes", help="Recipes: lists them; `show NAME` and `diff A B` print values."
)

Name = Annotated[str, typer.Argument(help="Name of a recipe (`megatron-rl recipes`).")]
All = Annotated[bool, typer.Option("--all", help="All keys, with those of machine and task.")]
RECIPE_SECTIONS = ("algorithm", "schedule", "generation", "optimizer", "precision")
"""The subjects of a recipe, with the rewards of `verifier`; the other sections depend on the
machine, the task and the run."""
REASONS = {"inferred": "inferred from the source", "choices": "on which the source says nothing"}


@app.callback(invoke_without_command=True)
def list_recipes(context: typer.Context) -> None:
    """List every recipe with its summary."""
    if context.invoked_subcommand is None:
        _print_table(("recipe", "summary"), ((n, recipes.load(n).summary) for n in recipes.names()))


@app.command()
def show(name: Name, every: All = False) -> None:
    """Print the values of a recipe as YAML, with its bases and the defaults."""
    recipe, values = recipes.load(name), resolved(name)
    given = dict(recipes.flatten(recipe.values))
    print(f"# {recipe.name}: {recipe.summary}")
    lines = {"source": recipe.source, "notes": recipe.notes, "based on": recipe.base}
    print(*(f"# {key}: {text}\n" for key, text in lines.items() if text), sep="", end="")
    for kind, title in REASONS.items():
        if reasons := getattr(recipe, kind):
            print(f"# {title}:")
            print(*(f"#   {key} = {given[key]}: {why}" for key, why in reasons.items()), sep="\n")
    print("# printed in the source: all other values that the recipe sets")
    if not every:
        rewards = {"verifier": {"values": values["verifier"]["values"]}}
        values = {key: values[key] for key in RECIPE_SECTIONS} | rewards
    print(yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=100), end="")


@app.command()
def diff(a: Name, b: Name) -> None:
    """Print the values in which two recipes differ."""
    _print_table(("key", a, b), differences(resolved(a), resolved(b)))


def resolved(name: str) -> dict[str, Any]:
    """Return the configuration of a recipe as plain values; `ConfigError` if there is none."""
    return load_config(None, ["--recipe", name]).model_dump(mode="json")


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, str, str]]:
    """List (dotted key, value in a, value in b) where they differ; `-` for a missing key."""
    left, right = dict(recipes.flatten(a)), dict(recipes.flatten(b))
    rows = [(k, str(left.get(k, "-")), str(right.get(k, "-"))) for k in {**left, **right}]
    return [(key, x, y) for key, x, y in rows if x != y and key != "recipe"]


def _print_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(*columns, header_style="bold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
