"""`megatron-rl plan`: the memory plan of a run, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from megatron_rl.commands.plan.layouts import layout_options, layout_problems, layout_values, search
from megatron_rl.commands.plan.memory import RESERVE_GIB, LayoutMemory, StageMemory, estimate
from megatron_rl.commands.plan.nodes import CHANGED_SHARE, GIB, LINK, UpdateTime, update_time
from megatron_rl.commands.plan.tensors import read_architecture
from megatron_rl.config import ConfigError, RunConfig, load_config
from megatron_rl.metrics.rollouts import BYTES_PER_TOKEN
from megatron_rl.orchestrator.evaluation import evaluation_steps

app = typer.Typer()
DOES_NOT_FIT = 3  # exit status: no layout fits
SCHEMA = "megatron_rl.memory_plan/2"
PARTS = (*(field.name for field in fields(StageMemory) if field.type == "float"), "total")
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
    config: Annotated[Path | None, Argument(help="YAML file of the run.")] = None,
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


def memory_plan(
    run: RunConfig,
    world: int | None = None,
    reserve_gib: float = RESERVE_GIB,
    search_layouts: bool = False,
    json_path: Path | None = None,
    changed_share: float = CHANGED_SHARE,
) -> int:
    """Print the memory plan of a run of `world` ranks; return 0, or `DOES_NOT_FIT`.

    Without `search_layouts`, layouts are proposed only if the given one does not fit.
    """
    architecture, roles = read_architecture(run), run.roles
    total, active = architecture.parameters(), architecture.active_parameters()
    print(f"model: {run.model}, {total:,} parameters", end="")
    print(f", {active:,} active" if active != total else "")
    world = world or roles.world_size
    problems = layout_problems(run, architecture)
    if roles.world_size != world:
        problems.append(
            f"the configuration has {roles.world_size} ranks (roles.trainer_ranks"
            f" {roles.trainer_ranks} + roles.generator_ranks {roles.generator_ranks}), but --world"
            f" is {world}"
        )
    memory = None
    if problems:
        _print_reasons("the configured layout cannot run:", problems)
    else:
        memory = estimate(run, architecture, reserve_gib)
        _print_memory(memory, reserve_gib)
        if not memory.misfits:
            print(f"fits {1 if roles.one_gpu else world} GPUs of {roles.gpu_gib:g} GiB")
        _print_reasons("the configured layout does not fit:", memory.misfits)
        _print_reasons("notes:", memory.notes)
    update = update_time(run, architecture, changed_share)
    _print_update(update, changed_share)
    print("rollout files:", _rollout_disk(run) if run.metrics.rollouts_every_steps else "none")
    fits, layouts = memory is not None and not memory.misfits, []
    if roles.one_gpu and (search_layouts or not fits):
        print("roles.one_gpu allows no other layout")
    elif search_layouts or not fits:
        layouts = search(run, architecture, world, reserve_gib)
        _print_layouts(layouts)
    layouts = [layout for layout in layouts if not layout.misfits]
    if json_path is not None:
        configured = {"layout": layout_values(run)} if memory is None else _as_json(memory)
        assumptions = {"gpu_gib": roles.gpu_gib, "host_gib": roles.host_gib}
        content = {
            "schema": SCHEMA,
            "assumptions": {**assumptions, "reserve_gib": reserve_gib},
            "configured": {"problems": problems, **configured},
            "update": {"changed_share": changed_share, **asdict(update)},
            "proposed": [_as_json(layout) for layout in layouts],
        }
        json_path.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if fits or layouts else DOES_NOT_FIT


def _print_reasons(title: str, reasons: list[str]) -> None:
    if reasons:
        print(title, *(f"  - {reason}" for reason in reasons), sep="\n")


def _print_memory(memory: LayoutMemory, reserve_gib: float) -> None:
    """Print a column for the first, the fullest and the last stage, then generator and host."""
    print(f"layout: {layout_options(memory.run)}")
    shown = {stage.stage: stage for stage in (memory.stages[0], memory.worst, memory.stages[-1])}
    stages = [shown[number] for number in sorted(shown)]
    rows = {"trainer rank of stage": [str(stage.stage) for stage in stages]}
    rows["parameters"] = [f"{sum(stage.count.values()):,}" for stage in stages]
    for part in PARTS:
        rows[f"{part} GiB"] = [f"{getattr(stage, part) / GIB:.2f}" for stage in stages]
    for name, cells in rows.items():
        print(f"  {name:<24}" + "".join(f"{cell:>17}" for cell in cells))
    roles, g = memory.run.roles, memory.generator
    print(
        "  (in the total, activations and logits or export, whichever is larger)\n"
        f"  of {roles.gpu_gib - reserve_gib:g} GiB ({roles.gpu_gib:g} less a reserve of"
        f" {reserve_gib:g})\n"
        f"generator rank: {g.weights / GIB:.2f} GiB weights, {g.workspace / GIB:.2f} GiB workspace,"
        f" {max(g.kv_cache, 0) / GIB:.2f} GiB KV cache = {g.sequences:.1f} sequences of"
        f" {memory.run.sequence_tokens:,} tokens per engine; {g.update / GIB:.2f} GiB an update"
    )
    for h in memory.hosts:
        print(
            f"host of {h.name}: {h.versions / GIB:.2f} GiB versions of the weights,"
            f" {h.saving / GIB:.2f} GiB saving, {h.processes / GIB:.2f} GiB processes, total"
            f" {h.total / GIB:.2f} of {roles.host_gib:g} GiB"
        )


def _print_update(update: UpdateTime, changed_share: float) -> None:
    whole, changed = update.num_bytes / 1e9, update.difference_bytes / 1e9
    travel = f"the engines read the trainer's stores, checksums {update.check:.2f} s"
    if update.stores:
        travel = (
            f"travel to {update.stores} nodes {update.travel_whole:.1f} s whole,"
            f" {update.travel_differences:.1f} s as differences ({LINK / 1e9:g} GB/s per node)"
        )
    elif update.travel_whole:
        travel = f"all nodes read it in {update.travel_whole:.1f} s, checksums {update.check:.2f} s"
    copy, pause = (
        " or ".join(f"{seconds:.2f} s ({link})" for link, seconds in by_link.items())
        for by_link in (update.copy_by_link, update.pause_by_link)
    )
    print(
        f"weight update: {whole:.1f} GB whole, {changed:.2f} GB as differences of"
        f" {changed_share:.2%} of the values\n"
        f"  the trainer waits {copy}\n"
        f"  while it trains and engines decode: differences {update.complete:.1f} s; {travel}\n"
        f"  engines pause {pause}"
    )


def _rollout_disk(run: RunConfig) -> str:
    s, e, sequence = run.schedule, run.evaluation, run.sequence_tokens * BYTES_PER_TOKEN / 1e6
    step = s.prompts_per_step * s.completions_per_prompt * sequence
    steps = min(s.steps * step, run.metrics.rollouts_gib * GIB / 1e6)
    held = sum(t.heldout_prompts for t in run.tasks.values()) * e.samples_per_prompt * sequence
    return (
        f"at most {step:,.1f} MB a step ({BYTES_PER_TOKEN} bytes a token), {steps:,.1f} MB of steps"
        f" (metrics.rollouts_gib), {len(evaluation_steps(e, s.steps))} evaluations, {held:,.1f} MB"
    )


def _print_layouts(layouts: list[LayoutMemory]) -> None:
    for i, layout in enumerate(layouts):
        options = layout_options(layout.run)
        if layout.misfits:
            _print_reasons(f"no layout fits; the nearest is {options}", layout.misfits)
            break
        print(
            f"{'or' if i else 'proposed'}: {options}\n"
            f"  {layout.worst.total / GIB:.2f} GiB on the fullest trainer rank,"
            f" {layout.generator.sequences:.0f} full sequences per engine"
        )
    if not layouts:
        print("no layout fits: none divides the model")


def _as_json(memory: LayoutMemory) -> dict[str, Any]:
    g = memory.generator
    return {
        "layout": layout_values(memory.run), "misfits": memory.misfits, "notes": memory.notes,
        "stages": [{**asdict(stage), "total": stage.total} for stage in memory.stages],
        "generator": {**asdict(g), "sequences": g.sequences},
        "hosts": [{**asdict(host), "total": host.total} for host in memory.hosts],
    }  # fmt: skip
