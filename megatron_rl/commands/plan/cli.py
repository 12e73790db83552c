"""`megatron-rl plan`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from megatron_rl.commands.plan.memory import RESERVE_GIB
from megatron_rl.commands.plan.nodes import CHANGED_SHARE
from megatron_rl.commands.plan.plan_report import memory_plan
from megatron_rl.config import ConfigError, load_config

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

WORLD = "Ranks of the run; default: those of the configuration."
RESERVE = "Of a trainer's GPU for CUDA, NCCL and fragmentation."
CHANGED = "Share of 16-bit values that a step changes: the size of a difference."
SEARCH = "Propose layouts even if the given one fits."
SIMULATE = "Instead of memory: simulate the loop, and print steps an hour, lag and waiting."
RUN = "With --simulate: folder of a run whose times and lengths are taken; else they are assumed."
ASSUME = "With --simulate: NAME=VALUE of an assumption or of a part's seconds; may be repeated."
VARY = "With --simulate: KEY=VALUE,VALUE of a choice; of several keys, all combinations."
STEPS = "With --simulate: steps that are counted."


@app.command("plan", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def plan_command(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="YAML file of the run.")] = None,
    config_option: Annotated[Path | None, Option("--config", help="The same.")] = None,
    world: Annotated[int | None, Option(help=WORLD)] = None,
    reserve_gib: Annotated[float, Option(help=RESERVE, min=0.0)] = RESERVE_GIB,
    changed_share: Annotated[float, Option(help=CHANGED, min=0.0, max=1.0)] = CHANGED_SHARE,
    search_layouts: Annotated[bool, Option("--search", help=SEARCH)] = False,
    json_path: Annotated[Path | None, Option("--json", help="Write the plan as JSON.")] = None,
    simulate: Annotated[bool, Option("--simulate", help=SIMULATE)] = False,
    recording: Annotated[Path | None, Option("--run", help=RUN)] = None,
    assume: Annotated[list[str] | None, Option(help=ASSUME)] = None,
    vary: Annotated[list[str] | None, Option(help=VARY)] = None,
    simulated_steps: Annotated[int, Option(help=STEPS, min=1)] = 40,
) -> None:
    """Print the memory of each rank before anything starts; propose a layout if it does not fit.

    Keys of the configuration, such as those of the machine (`--roles.gpu_gib 80
    --roles.gpus_per_node 8`), can follow as dotted options. Exit status 3: no layout fits.

    With --simulate, a model of the asynchronous loop: `plan CONFIG --simulate`, or `plan --simulate
    --run FOLDER`.
    """
    options = context.args
    if config is not None and str(config).startswith("--"):  # the configuration's first option
        options, config = [str(config), *options], None
    if config is not None and config_option is not None:
        raise ConfigError(f"two configurations, {config} and --config {config_option}: leave one")
    path = config_option or config
    if path is None and recording is not None:
        path = recording / "config.yaml"
    run = load_config(path, options)
    if simulate:
        from megatron_rl.commands.plan.loop_report import loop_plan  # the orchestrator's classes

        loop_plan(run, recording, assume or (), vary or (), simulated_steps, json_path)
        return
    if recording or assume or vary:
        raise ConfigError("--run, --assume and --vary belong to --simulate: add it")
    code = memory_plan(run, world, reserve_gib, search_layouts, json_path, changed_share)
    raise typer.Exit(code)
