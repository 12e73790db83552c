"""`megatron-rl ablate`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

RECIPES = "Recipes to compare, separated by commas (`megatron-rl recipes`)."
CONFIG = "YAML file of the sizes, on top of each recipe; default: the tiny task."
START = "Model that all runs start from; default: a supervised stage makes it."


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ablate(
    context: typer.Context,
    recipes: Annotated[str, Option(help=RECIPES)],
    seeds: Annotated[int, Option(min=1, help="Runs of each recipe, with seeds 1, 2, ...")] = 1,
    output: Annotated[Path, Option(help="Folder of the ablation.")] = Path("runs/ablation"),
    config: Annotated[Path | None, Option(help=CONFIG)] = None,
    start_checkpoint: Annotated[Path | None, Option(help=START)] = None,
    tokens: Annotated[int | None, Option(help="Tokens that end a run.")] = None,
    minutes: Annotated[float | None, Option(help="Minutes of RL that end a run.")] = None,
) -> None:
    """Run recipes on the tiny task, fit each, and compare them.

    Any key of the configuration can follow as a dotted option, for all runs. The same command
    continues an interrupted ablation; more recipes or seeds can be added to a folder.
    """
    from megatron_rl.commands.ablate import ablation_results, runs

    names = tuple(name.strip() for name in recipes.split(",") if name.strip())
    file, overrides = config or runs.TINY, tuple(context.args)
    ablation = runs.Ablation(
        names, seeds, output, file, start_checkpoint, tokens, minutes, overrides
    )
    # The current run is its own process group: interrupt it when this process is terminated.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    finished: list[runs.Run] = []
    try:
        for run in runs.execute(ablation, lambda text: print(text, flush=True)):
            finished.append(run)
            ablation_results.write(finished, output)
    except runs.RunFailed as e:
        typer.secho(f"megatron-rl ablate: {e}", err=True)
        raise typer.Exit(1) from None
    finally:
        if finished:
            print((output / "comparison.md").read_text())
            print(f"{output}/comparison.json, .md, .png")
