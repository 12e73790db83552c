"""`megatron-rl plan`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from megatron_rl.commands.plan.memory import RESERVE_GIB
from megatron_rl.commands.plan.nodes import CHANGED_SHARE
from megatron_rl.commands.plan.plan_report import memory_plan
from megatron_rl.config import load_config

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

WORLD = "Ranks of the run; default: those of the configuration."
RESERVE = "Of a trainer's GPU for CUDA, NCCL and fragmentation."
CHANGED = "Share of 16-bit values that a step changes: the size of a difference."
SEARCH = "Propose layouts even if the given one fits."


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
) -> None:
    """Print the memory of each rank before anything starts; propose a layout if it does not fit.

    Keys of the configuration, such as those of the machine (`--roles.gpu_gib 80
    --roles.gpus_per_node 8`), can follow as dotted options. Exit status 3: no layout fits.
    """
    run = load_config(config_option or config, context.args)
    code = memory_plan(run, world, reserve_gib, search_layouts, json_path, changed_share)
    raise typer.Exit(code)
