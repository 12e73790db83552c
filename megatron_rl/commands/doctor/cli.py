"""`megatron-rl doctor`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

MARKS = {"ok": "[green]ok[/green]  ", "note": "[cyan]note[/cyan]", "fail": "[red]FAIL[/red]"}


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file of a run whose settings count.")
    ] = None,
    port: Annotated[
        list[int] | None,
        typer.Option("--port", help="Port that must be free; may be repeated [29500]."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only what starts no other process (a health check).")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
) -> None:
    """Check versions, devices, upstream fixes, ports, memory and transport; say what to do.

    Exit status 0: a run can start here. 1: a line failed, and names its remedy. Any key of the
    configuration can follow as a dotted option.
    """
    from rich.console import Console

    from megatron_rl.commands.doctor.checks import Options, run_checks
    from megatron_rl.commands.doctor.node_check import RENDEZVOUS_PORT, SHARED_MEMORY
    from megatron_rl.config import load_config
    from megatron_rl.launch import generator_python

    run = load_config(config, context.args)
    options = Options(
        generator_python=generator_python(run),
        weights_directory=run.weights.directory or SHARED_MEMORY,
        ports=port or [int(os.environ.get("MASTER_PORT") or RENDEZVOUS_PORT)],
        quick=quick,
    )
    console = Console(soft_wrap=True, highlight=False)
    results = []
    for result in run_checks(options):
        results.append(result)
        if as_json:
            continue
        text = f"{MARKS[result.status]} {result.check}: "
        console.print(text, end="")
        console.print(result.detail, markup=False)
        if result.remedy:
            console.print(f"     -> {result.remedy}", markup=False)
    failed = [result.check for result in results if result.status == "fail"]
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [asdict(r) for r in results]}, indent=1))
    elif failed:
        console.print(f"{len(failed)} of {len(results)} lines failed: {', '.join(failed)}")
    else:
        console.print("nothing is in the way of a run here")
    if failed:
        raise typer.Exit(1)
