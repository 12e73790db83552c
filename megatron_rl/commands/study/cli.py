"""`megatron-rl study`, and `megatron-rl ablate`, the same for recipes on the tiny task."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

if TYPE_CHECKING:
    from megatron_rl.commands.study.study_file import Study

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

STUDY = "A YAML file (docs/study.md), or a study of the paper: fig2, loo, forward, axes."
RECIPES = "Recipes or their files, separated by commas, instead of the study's runs."
CONFIG = "Base configuration instead of the study's; a second one for its other model."
START = "Model that all runs start from; default: a supervised stage makes a tiny model's."
JOBS = "Write the jobs of the unfinished runs into this folder, from --template."
TEMPLATE = "examples/cluster/slurm.sh or kubernetes.yaml, or a copy with your settings."


@app.command("ablate", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def study(
    context: typer.Context,
    study: Annotated[str, typer.Argument(help=STUDY)] = "ablation",
    recipes: Annotated[str | None, Option(help=RECIPES)] = None,
    seeds: Annotated[int | None, Option(min=1, help="Runs of each entry: seeds 1, 2, ...")] = None,
    config: Annotated[list[Path] | None, Option(help=CONFIG)] = None,
    output: Annotated[Path | None, Option(help="Folder of the runs; default: runs/STUDY.")] = None,
    start_checkpoint: Annotated[Path | None, Option(help=START)] = None,
    tokens: Annotated[float | None, Option(help="Tokens that end a run.")] = None,
    minutes: Annotated[float | None, Option(help="Minutes of RL that end a run.")] = None,
    plan: Annotated[bool, Option("--plan", help="List runs, GPU-hours and commands.")] = False,
    results: Annotated[bool, Option("--results", help="Fit what there is; run nothing.")] = False,
    jobs: Annotated[Path | None, Option(help=JOBS)] = None,
    template: Annotated[Path | None, Option(help=TEMPLATE)] = None,
) -> None:
    """Run recipes and grids of values here or as jobs, fit each run, and compare them.

    Any key of the configuration can follow as a dotted option, for all runs. The same command
    continues an interrupted study; runs can be added.
    """
    from megatron_rl.commands.study import study_file

    changes: dict[str, Any] = {"seeds": seeds} if seeds else {}
    if recipes is not None:
        changes["runs"] = [{"recipe": [name.strip() for name in recipes.split(",")]}]
    if budget := {k: v for k, v in (("tokens", tokens), ("minutes", minutes)) if v is not None}:
        changes["budget"] = budget
    options = context.args
    if study.startswith("--"):  # no study, and the first option is the configuration's
        study, options = "ablation", [study, *options]
    above = (output, tuple(config or ()), start_checkpoint, tuple(options))
    loaded = study_file.load(study, changes, *above)
    if plan:
        _print_plan(loaded)
    elif jobs is not None and template is not None:
        from megatron_rl.commands.study.jobs import write

        runs = [run for run in loaded.runs() if run.ended_by() is None]
        print(*write(runs, loaded.name, template, jobs), sep="\n")
    elif jobs is not None:
        raise typer.BadParameter("--jobs needs --template")
    else:
        _execute(loaded, only_fit=results)


def _print_plan(study: Study) -> None:
    """Print state, sizes, estimated GPU-hours and commands of the runs."""
    runs, total = study.runs(), 0.0
    print(f"{study.name}: {study.values.get('summary', '')}\n")
    form = f"{{:{max(len(run.name) for run in runs)}}}  {{:16}}" + "{:>8}" * 2 + "{:>6}{:>11}{:>8}"
    print(form.format("run", "state", "steps", "batch", "GPUs", "GPU-hours", "days"))
    for run in runs:
        s, devices, hours = run.config.schedule, run.config.roles.devices, run.gpu_hours
        ended, done = run.ended_by(), run.steps_done()
        state = f"ended by {ended}" if ended else f"at step {done}" if done else "new"
        cost = ("-", "-") if hours is None else (f"{hours:,.0f}", f"{hours / devices / 24:.1f}")
        batch = f"{s.prompts_per_step} x {s.completions_per_prompt}"
        print(form.format(run.name, state, s.steps, batch, devices, *cost))
        total += hours or 0.0
    if total:
        print(
            f"\n{total:,.0f} GPU-hours, an estimate: steps x completions x hours of a completion,"
        )
        print(f"on any number of GPUs. {study.values.get('source', '')}")
    for run in (run for run in runs if run.ended_by() is None):
        print(f"\n{shlex.join(['megatron-rl', *run.arguments])}")


def _execute(study: Study, only_fit: bool) -> None:
    """Execute the runs, or take those that have begun, and fit them."""
    from megatron_rl.commands.study import runs, study_results

    # The current run is its own process group: interrupt it when this process is terminated.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    members, shared_a, done = study.runs(), study.values.get("shared_a"), list[runs.Run]()
    for run in members:
        run.check_folder()
    if only_fit and (done := [run for run in members if run.rows()]):
        study_results.write(done, study.output, shared_a)
    try:
        for run in () if only_fit else runs.execute(members, lambda text: print(text, flush=True)):
            done.append(run)
            study_results.write(done, study.output, shared_a)
    except runs.RunFailed as e:
        typer.secho(f"megatron-rl study: {e}", err=True)
        raise typer.Exit(1) from None
    finally:
        if done:
            print((study.output / "comparison.md").read_text())
            print(f"{study.output}/comparison.json, .md, .png")
