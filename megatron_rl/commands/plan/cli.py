"""`megatron-rl plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_rl.commands.plan import plan_report
from megatron_rl.commands.plan.generator_memory import Assumptions
from megatron_rl.commands.plan.layout import Layout, division_problems, node_problems
from megatron_rl.commands.plan.memory import estimate
from megatron_rl.commands.plan.search import search
from megatron_rl.commands.plan.transfer import estimate_transfer
from megatron_rl.config import TINY_MODELS, ConfigError, RunConfig, load_config

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

GpuGib = Annotated[
    float | None, typer.Option(help="Memory of a GPU in GiB; default: roles.gpu_gib.", min=1.0)
]
GpusPerNode = Annotated[
    int | None, typer.Option(help="GPUs of a node; default: roles.gpus_per_node.", min=1)
]
DoesNotFit = 3
"""Exit status: nothing fits."""


@app.command("plan", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def plan_command(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="YAML file of the run.")],
    world: Annotated[
        int | None, typer.Option(help="Ranks of the run; default: those of the configuration.")
    ] = None,
    gpu_gib: GpuGib = None,
    reserve_gib: Annotated[
        float, typer.Option(help="Of a trainer's GPU for CUDA, NCCL and fragmentation.", min=0.0)
    ] = 6.0,
    gpus_per_node: GpusPerNode = None,
    search_layouts: Annotated[
        bool, typer.Option("--search", help="Propose layouts even where the given one fits.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the plan as JSON.")
    ] = None,
) -> None:
    """Memory of each rank, before anything starts; proposes a layout where the given one fails.

    Keys of the configuration can follow as dotted options. Exit status 3: nothing fits.
    """
    run = load_config(config, context.args)
    assumed = Assumptions(gpu_gib or run.roles.gpu_gib, reserve_gib)
    raise typer.Exit(memory_plan(run, world, assumed, gpus_per_node, search_layouts, json_path))


def memory_plan(
    run: RunConfig,
    world: int | None,
    assumed: Assumptions,
    gpus_per_node: int | None = None,
    search_layouts: bool = False,
    json_path: Path | None = None,
) -> int:
    """Prints the memory plan of a configuration.

    Returns:
        0, or `DoesNotFit`.
    """
    name, architecture = model_of(run)
    plan_report.print_model(name, architecture)
    layout, node = Layout.of(run), gpus_per_node or run.roles.gpus_per_node
    ranks = layout.world if world is None else world
    problems = [*division_problems(run, layout, architecture), *node_problems(layout, node)]
    if layout.world != ranks:
        problems.append(
            f"the configuration has {layout.world} ranks (roles.trainer_ranks"
            f" {layout.trainer_ranks} + roles.generator_ranks {layout.generator_ranks}) and"
            f" --world is {ranks}"
        )
    memory = None
    if problems:
        plan_report.print_problems("the configured layout cannot run:", problems)
    else:
        memory = estimate(run, layout, architecture, assumed)
        plan_report.print_memory(layout, memory, assumed)
        if memory.misfits:
            plan_report.print_problems("the configured layout does not fit:", list(memory.misfits))
        else:
            print(f"fits {ranks} GPUs of {assumed.gpu_gib:g} GiB")
    transfer = estimate_transfer(run, architecture)
    plan_report.print_transfer(transfer)
    fits = memory is not None and not memory.misfits
    found = None
    if search_layouts or not fits:
        found = search(run, architecture, ranks, node, assumed)
        plan_report.print_search(found)
    if json_path is not None:
        content = plan_report.as_json(layout, problems, memory, transfer, found, assumed)
        json_path.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if fits or (found is not None and found.found) else DoesNotFit


def model_of(run: RunConfig) -> tuple[str, Architecture]:
    """The model of a run, from its directory or its named configuration.

    Raises:
        ConfigError: no config.json, one that is not implemented, or no torch.
    """
    from megatron_rl.models import architecture, named_config, named_configs

    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "counting the parameters of a model needs torch: pip install 'megatron_rl[cpu]'"
        ) from None
    start = run.start_checkpoint
    if start is not None and (start / "config.json").is_file():
        config: Any = json.loads((start / "config.json").read_text())
    elif run.model in named_configs():
        config = named_config(run.model)
    elif run.model in TINY_MODELS:
        from megatron_rl.models.tiny import CONFIGS

        config = CONFIGS[run.model]
    else:
        path = Path(run.model) / "config.json"
        if not path.is_file():
            raise ConfigError(f"model: {path} does not exist: give a Hugging Face directory")
        config = json.loads(path.read_text())
    try:
        return run.model, architecture(config)
    except ValueError as e:
        raise ConfigError(f"model {run.model}: {e}") from None
