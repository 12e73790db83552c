"""`megatron-rl ablate`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ablate(
    context: typer.Context,
    recipes: Annotated[
        str, typer.Option(help="Recipes to compare, with commas (`megatron-rl recipes`).")
    ],
    seeds: Annotated[int, typer.Option(help="Runs of each recipe, with seeds 1, 2, ...")] = 1,
    output: Annotated[Path, typer.Option(help="Folder of the ablation.")] = Path("runs/ablation"),
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of the sizes, on top of each recipe; default: the tiny task."),
    ] = None,
    start_checkpoint: Annotated[
        Path | None,
        typer.Option(help="Model that all runs start from; default: a supervised stage makes it."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens after which a run ends.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes of RL after which a run ends.")
    ] = None,
) -> None:
    """Run recipes on the tiny task, fit each, and compare them.

    Any key of the configuration can follow as a dotted option, for all runs. The same command goes
    on with what is not over yet; more recipes or seeds can be added to a folder.
    """
    from megatron_rl.commands.ablate import ablation_results, runs

    plan = runs.Plan(
        recipes=tuple(name.strip() for name in recipes.split(",") if name.strip()),
        seeds=seeds,
        output=output,
        config=config or runs.TINY,
        start_checkpoint=start_checkpoint,
        budget=runs.Budget(tokens, minutes),
        overrides=tuple(context.args),
    )
    # The run that is under way is a process group of its own: whatever ends this one stops it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    over: list[runs.Run] = []
    try:
        for run in runs.execute(plan, lambda text: print(text, flush=True)):
            over.append(run)
            ablation_results.write(over, output)
    except runs.RunFailed as e:
        typer.secho(f"megatron-rl ablate: {e}", err=True)
        raise typer.Exit(1) from None
    finally:
        if over:
            print((output / "comparison.md").read_text())
            print(f"{output}/comparison.json, .md, .png")
