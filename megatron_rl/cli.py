"""The `megatron-rl` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.commands.ablate.cli import app as ablate_app
from megatron_rl.commands.convert.cli import app as convert_app
from megatron_rl.commands.doctor.cli import app as doctor_app
from megatron_rl.commands.evaluate.cli import app as evaluation_app
from megatron_rl.commands.plan.cli import app as plan_app
from megatron_rl.commands.prepare.cli import app as data_app
from megatron_rl.commands.recipes import app as recipes_app
from megatron_rl.commands.verify import app as rewards_app
from megatron_rl.compat.quiet import silence_notices
from megatron_rl.scaling.cli import app as scaling_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement learning of large language models at scale on Megatron-Core.",
)
app.add_typer(scaling_app)
app.add_typer(rewards_app)
app.add_typer(recipes_app, name="recipes")
app.add_typer(ablate_app)
app.add_typer(convert_app)
app.add_typer(plan_app)
app.add_typer(doctor_app)
app.add_typer(evaluation_app)
app.add_typer(data_app, name="data")

# At import: the processes that vLLM spawns import the main module before they import vLLM.
silence_notices()

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="YAML file of the run; omit for the defaults.")
]


@app.command(context_settings=OVERRIDES)
def train(
    context: typer.Context,
    config: ConfigOption = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the resolved plan and start nothing.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print configuration, roles, paths, memory and launch lines; start nothing.",
        ),
    ] = False,
) -> None:
    """Train a policy: `megatron-rl train --config run.yaml --schedule.steps 40`.

    Any key of the configuration can follow as a dotted option. Outside torchrun, or under a
    torchrun with one rank, the command starts itself anew with the ranks that the configuration
    needs.
    """
    if plan:
        from megatron_rl.config import load_config
        from megatron_rl.orchestrator.run_plan import print_plan

        print_plan(load_config(config, context.args))
        return
    if dry_run:
        from megatron_rl.commands.plan.dry_run import dry_run as show
        from megatron_rl.config import load_config

        settings = load_config(config, context.args)
        # Under torchrun all ranks would say the same.
        if os.environ.get("RANK", "0") == "0":
            raise typer.Exit(show(settings, config, context.args))
        return
    from megatron_rl.train import run

    run("train", config, context.args)


@app.command(context_settings=OVERRIDES)
def sft(context: typer.Context, config: ConfigOption = None) -> None:
    """Run the supervised stage that makes the start checkpoint of a tiny model."""
    from megatron_rl.train import run

    run("sft", config, context.args)


@app.command("config")
def show_config() -> None:
    """Print every configuration key with its type, default and meaning."""
    from rich.console import Console
    from rich.markup import escape

    from megatron_rl.config import describe

    console = Console(soft_wrap=True)
    for key, kind, default, text in describe():
        rest = escape(f"({kind}, default {default}): {text}")  # kinds are in brackets
        console.print(f"[bold]{key}[/bold] {rest}", highlight=False)


def main(arguments: list[str] | None = None) -> None:
    """Entry of the console script and of the examples; what cannot run exits with 2."""
    from megatron_rl.compat.upstream import UnsupportedVersionError
    from megatron_rl.config import ConfigError

    try:
        app(args=arguments, prog_name="megatron-rl")
    except (ConfigError, UnsupportedVersionError) as e:
        print(f"megatron-rl: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
