"""`megatron-rl doctor`."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option

from megatron_rl.commands.doctor import Result, node_checks, software_checks
from megatron_rl.commands.doctor.script import report
from megatron_rl.commands.plan.nodes import nodes_of
from megatron_rl.config import RunConfig, load_config
from megatron_rl.launch import generator_python
from megatron_rl.weights.store import SHARED_MEMORY

app = typer.Typer()
MARKS = {"ok": "[green]ok[/green]  ", "note": "[cyan]note[/cyan]", "fail": "[red]FAIL[/red]"}
RENDEZVOUS_PORT = 29500  # torchrun's default
STARTS_PROCESSES = ("Transformer Engine", "all-reduce", "weights between nodes")
PORT = "Port that must be free; may be repeated [29500]."
QUICK = "Only checks that start no process."


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor(
    context: typer.Context,
    config: Annotated[Path | None, Option(help="YAML file of a run whose settings count.")] = None,
    port: Annotated[list[int] | None, Option(help=PORT)] = None,
    quick: Annotated[bool, Option("--quick", help=QUICK)] = False,
    as_json: Annotated[bool, Option("--json", help="One JSON object instead of text.")] = False,
    script: Annotated[Path | None, Option(help="A script to change for RL.", exists=True)] = None,
    write: Annotated[Path | None, Option(help="File for the changed --script.")] = None,
) -> None:
    """Check versions, devices, upstream fixes, ports, memory and weights; print remedies.

    Exit status 0: a run can start here. 1: a line failed, and names its remedy. Any key of the
    configuration can follow as a dotted option. `--script` checks a pretraining script instead.
    """
    if script is not None and not as_json:
        raise typer.Exit(0 if report(script, write) else 1)
    if script is not None or write is not None:
        raise typer.BadParameter("--write needs --script, which prints no --json")
    run = load_config(config, context.args)
    python = generator_python(run) or sys.executable
    ports = port or [int(os.environ.get("MASTER_PORT") or RENDEZVOUS_PORT)]
    console = Console(soft_wrap=True, highlight=False)
    checks, failed = [], []
    for name, result in run_checks(run, python, ports, quick):
        checks.append({"check": name, **asdict(result)})
        failed += [name] * (result.status == "fail")
        if not as_json:
            console.print(f"{MARKS[result.status]} {name}: ", end="")
            remedy = f"\n     -> {result.remedy}" if result.remedy else ""
            console.print(result.detail + remedy, markup=False)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": checks}, indent=1))
    elif failed:
        console.print(f"{len(failed)} of {len(checks)} lines failed: {', '.join(failed)}")
    else:
        console.print("All checks passed")
    raise typer.Exit(1 if failed else 0)


def run_checks(
    run: RunConfig, python: str, ports: list[int], quick: bool
) -> Iterator[tuple[str, Result]]:
    """Yield the lines of the report as soon as they are known, causes before consequences."""
    yield from _lines("python", software_checks.check_python)
    gpus = software_checks.check_gpus()
    yield from gpus.items()
    if "torch" in gpus:
        return  # all other checks would fail as well
    cuda = gpus["GPUs"].status == "ok"
    answer: dict[str, Any] = {}
    if not quick:
        answer, line = software_checks.probe_generator(python)
        yield "generator environment", line
    shared, in_directory = node_checks.stored_bytes(run)
    # Whether nodes of this run take versions from others.
    root, needed = run.weights.directory or SHARED_MEMORY, bool(nodes_of(run).stores)
    fp8 = run.weights.quantization == "fp8"
    checks: dict[str, Callable[[], Result | dict[str, Result]]] = {
        "versions": partial(software_checks.check_versions, answer, cuda=cuda, fp8=fp8),
        "Transformer Engine": partial(software_checks.check_transformer_engine, cuda=cuda),
        "fp32 products": software_checks.check_fp32_products,
        "compiled kernels": partial(software_checks.check_kernels, cuda=cuda),
        "vLLM": partial(software_checks.check_features, answer),
        "upstream fixes": partial(software_checks.check_upstream_fixes, answer),
        "NCCL": partial(software_checks.check_nccl, answer, cuda=cuda),
        "machine": partial(node_checks.check_memory, run.roles.host_gib, cuda=cuda),
        "open files": node_checks.check_open_files,
        "locked memory": node_checks.check_locked_memory,
        "shared memory": partial(node_checks.check_shared_memory, SHARED_MEMORY, shared, cuda=cuda),
        "weights.directory": partial(node_checks.check_directory, root, in_directory),
        "loopback": node_checks.check_loopback,
        **{f"port {port}": partial(node_checks.check_port, port) for port in ports},
        "all-reduce": partial(node_checks.check_all_reduce, cuda=cuda),
        "weight store": partial(node_checks.check_store, root, cuda=cuda),
        "weights between nodes": partial(node_checks.check_reads, python, needed=needed),
    }
    if run.weights.directory is None:
        del checks["weights.directory"]
    for name, check in checks.items():
        if not (quick and name in STARTS_PROCESSES):
            yield from _lines(name, check)


def _lines(name: str, check: Callable[[], Result | dict[str, Result]]) -> list[tuple[str, Result]]:
    """Return the lines of a check; an error is a line, too."""
    try:
        result = check()
    except Exception as e:  # noqa: BLE001
        result = software_checks.broken(e)
    return [(name, result)] if isinstance(result, Result) else list(result.items())
