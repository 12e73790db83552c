"""`megatron-rl study`, and `megatron-rl ablate`, the same for recipes on the tiny task."""

import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from megatron_rl.commands.study import jobs as cluster
from megatron_rl.commands.study import runs, study_file

app = typer.Typer()

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
    from megatron_rl.commands.study import study_results  # it imports SciPy

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
    members = loaded.runs()
    if plan:
        loaded.print_plan(members)
        return
    if jobs is not None:
        if template is None:
            raise typer.BadParameter("--jobs needs --template")
        unfinished = [run for run in members if run.ended_by() is None]
        print(*cluster.write(unfinished, loaded.name, template, jobs), sep="\n")
        return
    # The current run is its own process group: interrupt it when this process is terminated.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for run in members:
        run.check_folder()
    done = [r for r in members if r.rows() or r.rows("eval")] if results else []
    try:
        if done:
            study_results.write(done, loaded.output, loaded.values.get("shared_a"))
        for run in () if results else runs.execute(members):
            done.append(run)
            study_results.write(done, loaded.output, loaded.values.get("shared_a"))
    except runs.RunFailed as e:
        typer.secho(f"megatron-rl study: {e}", err=True)
        raise typer.Exit(1) from None
    finally:
        if done:
            print((loaded.output / "comparison.md").read_text())
            print(f"{loaded.output}/comparison.json, .md, .png")
