"""The `megatron-rl` command."""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from megatron_rl.commands.alive import alive
from megatron_rl.compat.quiet import silence_notices


class _Commands(TyperGroup):
    """The commands of this file, which import little, and all others, imported when needed."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or _others().get(cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_others()]


@cache
def _others() -> dict[str, Any]:
    from megatron_rl.commands.convert.cli import app as convert
    from megatron_rl.commands.doctor.cli import app as doctor
    from megatron_rl.commands.evaluate.cli import app as evaluate
    from megatron_rl.commands.list_runs import app as runs
    from megatron_rl.commands.model.fetch_model import app as model
    from megatron_rl.commands.plan.cli import app as plan
    from megatron_rl.commands.prepare import app as data
    from megatron_rl.commands.recipes import app as recipes
    from megatron_rl.commands.report.cli import app as report
    from megatron_rl.commands.study.cli import app as study
    from megatron_rl.commands.verify import app as verify
    from megatron_rl.commands.view.cli import app as view
    from megatron_rl.scaling.cli import app as scaling

    others = typer.Typer()
    of_runs = (study, plan, doctor, evaluate, view, report, runs, recipes)
    for commands in (scaling, verify, convert, *of_runs, data, model):
        others.add_typer(commands)
    return dict(typer.main.get_group(others).commands)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement learning of large language models at scale on Megatron-Core.",
)
app.command()(alive)

# At import: the processes that vLLM spawns import the main module before they import vLLM.
silence_notices()

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
Config = Annotated[Path | None, Option(help="YAML file of the run; omit for the defaults.")]
REPLAY = "Folder of a run: train on its rollout files, without generators."
STEPS = "First and last step to replay, as 3-7 [all]."
DRY_RUN = "Print configuration, roles, paths, memory and launch lines; start nothing."


@app.command(context_settings=OVERRIDES)
def train(
    context: typer.Context,
    config: Config = None,
    plan: Annotated[bool, Option("--plan", help="Print the resolved plan; start nothing.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help=DRY_RUN)] = False,
    replay: Annotated[Path | None, Option(help=REPLAY)] = None,
    steps: Annotated[str | None, Option(help=STEPS)] = None,
) -> None:
    """Train a policy: `megatron-rl train --config run.yaml --schedule.steps 40`.

    Any key of the configuration can follow as a dotted option. Without torchrun, or under a
    torchrun with one rank, the command restarts itself under torchrun with all ranks.
    """
    if (replay is None and steps is not None) or (replay is not None and (config or dry_run)):
        from megatron_rl.section import ConfigError

        raise ConfigError(
            "--steps belongs to --replay, which takes the configuration of its run: leave --config"
            " and --dry-run out (--plan prints the plan); a run has --schedule.steps"
        )
    if plan or dry_run:
        from megatron_rl.config import load_config
        from megatron_rl.orchestrator.replay import plan_replay

        given = context.args
        settings = (
            plan_replay(replay, steps, given).config if replay else load_config(config, given)
        )
        if plan:
            from megatron_rl.orchestrator.run_plan import print_plan

            print_plan(settings)
        elif os.environ.get("RANK", "0") == "0":  # one report, not one per rank
            from megatron_rl.commands.plan.dry_run import dry_run as print_dry_run

            raise typer.Exit(print_dry_run(settings, config, context.args))
        return
    from megatron_rl.train import run

    run("train", config, context.args, replay, steps)


@app.command(context_settings=OVERRIDES)
def sft(context: typer.Context, config: Config = None) -> None:
    """Fine-tune on rows of prompt and response: `megatron-rl sft --config examples/sft_8b.yaml`.

    The result, `output_dir/final`, is a run's `start_checkpoint`. Without `sft.source`, a tiny
    model makes its own start checkpoint from demonstrations. `--resume` continues.
    """
    from megatron_rl.train import run

    run("sft", config, context.args)


@app.command()
def generate(
    join: Annotated[str, Option(help="HOST:PORT of the orchestrator, or the run's output_dir.")],
    name: Annotated[str, Option(help="Name in the run [generator-HOST-NUMBER].")] = "",
    agent: Annotated[int, Option(hidden=True)] = 0,
    record: Annotated[int, Option(hidden=True)] = -1,
) -> None:
    """Generate for a run: `megatron-rl generate --join runs/scalerl_8b`.

    It may join and leave at any time, takes the configuration from the run, and outlives its
    trainer for timeouts.rejoin_seconds. SIGTERM lets it end its work first.
    """
    from megatron_rl.generator.role import run_generator

    run_generator(join, name, agent, record)


@app.command("config")
def show_config() -> None:
    """Print every configuration key with its type, default and meaning."""
    from rich.console import Console
    from rich.markup import escape

    from megatron_rl.config import describe

    console = Console(soft_wrap=True)
    for key, kind, default, text in describe():
        default = default if default == "required" else f"default {default}"
        rest = escape(f"({kind}, {default}): {text}")  # kinds are in brackets
        console.print(f"[bold]{key}[/bold] {rest}", highlight=False)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a configuration, installation or folder that cannot run exits with 2."""
    try:
        app(args=arguments, prog_name="megatron-rl")
    except Exception as e:
        from megatron_rl.compat.upstream import UnsupportedVersionError
        from megatron_rl.run_lock import FolderInUse
        from megatron_rl.section import ConfigError

        if not isinstance(e, ConfigError | UnsupportedVersionError | FolderInUse):
            raise
        print(f"megatron-rl: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
