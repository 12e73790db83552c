"""`megatron-rl evaluate`: pass rates of a checkpoint on evaluation sets."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from megatron_rl.commands.evaluate.source import Source

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=OVERRIDES)
def evaluate(
    context: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="Hugging Face directory, checkpoint of a run, or a run's folder (its newest)."
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="aime2024, aime2025, math500, livecodebench, NAME=PATH of a local copy, a .jsonl,"
            " or `run`: the run's own held-out prompts (default). Can be repeated."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Completions of each prompt; default: the run's."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sampling temperature; default: the run's.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many questions of each set.")
    ] = None,
    verifier: Annotated[
        str, typer.Option(help="Verifier of a .jsonl whose rows name no `kind`.")
    ] = "math",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the engine.")] = 0,
    config: Annotated[
        Path | None, typer.Option(help="Configuration to use; default: the run's config.yaml.")
    ] = None,
    huggingface: Annotated[
        Path | None,
        typer.Option(help="Keep the converted checkpoint here; default: it is removed."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all estimates as one JSON object.")
    ] = None,
    jsonl_file: Annotated[
        Path | None, typer.Option("--jsonl", help="Write every completion with its verdict.")
    ] = None,
    fit_file: Annotated[
        Path | None,
        typer.Option("--fit", help="Add a point to this .jsonl, which `megatron-rl fit` reads."),
    ] = None,
    series: Annotated[
        str | None, typer.Option(help="Name of the curve in --fit; default: the run's folder.")
    ] = None,
) -> None:
    """Evaluate a checkpoint: mean@n, pass@k, majority@n with standard errors, by difficulty.

    Any key of the configuration can follow as a dotted option, such as
    `--generation.answer_budget_tokens 4096`.
    """
    from megatron_rl.commands.convert.errors import ConvertError
    from megatron_rl.commands.evaluate.source import find_source
    from megatron_rl.config import ConfigError
    from megatron_rl.data.question import DataError
    from megatron_rl.rewards import VerifierError

    try:
        source = find_source(checkpoint, config, context.args)
        result, rows = _evaluated(
            source,
            data or _default_data(source),
            samples=samples,
            temperature=temperature,
            limit=limit,
            verifier=verifier,
            seed=seed,
            huggingface=huggingface,
            needs_compute=fit_file is not None,
        )
        _written(result, rows, json_file, jsonl_file, fit_file, series or _series(source))
    except (ConfigError, ConvertError, DataError, VerifierError) as e:
        print(f"megatron-rl evaluate: {e}", file=sys.stderr)
        raise typer.Exit(2) from None


def _default_data(source: Source) -> list[str]:
    from megatron_rl.commands.evaluate.questions import RUN
    from megatron_rl.config import ConfigError

    if source.run is None:
        raise ConfigError(
            f"{source.path} belongs to no run: say what to evaluate it on with --data"
        )
    return [RUN]


def _series(source: Source) -> str:
    return source.run.resolve().name if source.run is not None else source.path.name


def _evaluated(
    source: Source,
    data: list[str],
    *,
    samples: int | None,
    temperature: float | None,
    limit: int | None,
    verifier: str,
    seed: int,
    huggingface: Path | None,
    needs_compute: bool,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the object of --json, the rows of --jsonl)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from megatron_rl.commands.evaluate import evaluation_report, results
    from megatron_rl.commands.evaluate import source as sources
    from megatron_rl.config import ConfigError

    rows = sources.metrics_of(source)
    compute = sources.compute_at(source.step, rows)
    if needs_compute and not compute:
        raise ConfigError(
            f"--fit: how much compute made {source.path} is unknown (no run's folder with a"
            " metrics.jsonl of its step around it); write --json and add the compute yourself"
        )
    with tempfile.TemporaryDirectory(prefix="megatron_rl_") as folder:
        model = sources.huggingface_directory(source, huggingface or Path(folder) / "model")

        from tokenizers import Tokenizer

        from megatron_rl.commands.evaluate import sampling as engines
        from megatron_rl.commands.evaluate.questions import load_sets
        from megatron_rl.data import read_format

        config = source.config
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        form = read_format(model, config.generation.think_start)
        sets = load_sets(data, config, tokenizer, form, kind=verifier, limit=limit)
        how = engines.Sampling(
            samples=samples or config.evaluation.samples_per_prompt,
            temperature=config.generation.temperature if temperature is None else temperature,
            seed=seed,
        )
        console = evaluation_report.make_console()
        total = how.samples * sum(len(s.prompts) for s in sets)
        started = time.monotonic()
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("completions", total=total)
            answers = engines.run(
                config, model, tokenizer, sets, how, lambda n: progress.advance(bar, n)
            )
    own = {s.name: [a for a in answers if a.data == s.name] for s in sets}
    found = [results.measured(s, own[s.name], how.samples) for s in sets]
    for one in found:
        if (theirs := _own_row(source, rows, one)) is not None and limit is None:
            one["run_evaluation"] = results.beside_the_run(theirs, one)
    g = config.generation
    result = {
        "schema": results.SCHEMA,
        "checkpoint": str(source.path),
        "step": source.step,
        "compute": compute,
        "sampling": {
            "samples": how.samples,
            "temperature": how.temperature,
            "seed": how.seed,
            "interruption": g.interruption,
            "thinking_budget_tokens": g.thinking_budget_tokens[1],
            "answer_budget_tokens": g.answer_budget_tokens,
        },
        "seconds": time.monotonic() - started,
        "sets": found,
    }
    evaluation_report.show(result, console)
    return result, list(results.completion_rows(sets, answers))


def _own_row(
    source: Source, rows: list[dict[str, Any]], found: dict[str, Any]
) -> dict[str, Any] | None:
    """What the run measured on the same held-out prompts of a task, or of all."""
    from megatron_rl.commands.evaluate.questions import RUN
    from megatron_rl.commands.evaluate.source import evaluation_at

    row = evaluation_at(source.step, rows)
    name, _, task = found["data"].partition("/")
    if row is None or name != RUN:
        return None
    return row.get("tasks", {}).get(task) if task else row


def _written(
    result: dict[str, Any],
    rows: list[dict[str, Any]],
    json_file: Path | None,
    jsonl_file: Path | None,
    fit_file: Path | None,
    series: str,
) -> None:
    from megatron_rl.commands.evaluate import results

    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if jsonl_file is not None:
        results.write_lines(jsonl_file, rows)
    if fit_file is not None:
        results.add_points(fit_file, results.fit_rows(result, series))
