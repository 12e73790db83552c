"""`megatron-rl evaluate`: pass rates of a checkpoint on evaluation sets."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from megatron_rl.commands.evaluate.model_source import ModelSource
    from megatron_rl.commands.evaluate.results import Row

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PATH_HELP = "Hugging Face directory, checkpoint of a run, or a run's folder (its newest)."
DATA_HELP = """aime2024, aime2025, math500, livecodebench, NAME=PATH of a local copy, a .jsonl, or
`run`: the run's own held-out prompts (default). Can be repeated."""
Samples = Annotated[int | None, Option(min=1, help="Completions per prompt; default: the run's.")]
Temperature = Annotated[float | None, Option(min=0.0, help="Temperature; default: the run's.")]
Verifier = Annotated[str, Option(help="Verifier of a .jsonl whose rows name no `kind`.")]
Config = Annotated[Path | None, Option(help="Configuration; default: the run's config.yaml.")]
Kept = Annotated[Path | None, Option(help="Keep the conversion here; default: delete it.")]
Json = Annotated[Path | None, Option("--json", help="Write all estimates as one JSON object.")]
Jsonl = Annotated[Path | None, Option("--jsonl", help="Write every completion with its verdict.")]
Fit = Annotated[Path | None, Option("--fit", help="Add a point to a .jsonl of `megatron-rl fit`.")]
Series = Annotated[str | None, Option(help="Curve's name in --fit; default: the run's folder.")]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def evaluate(
    context: typer.Context,
    checkpoint: Annotated[Path, Argument(help=PATH_HELP)],
    data: Annotated[list[str] | None, Option(help=DATA_HELP)] = None,
    samples: Samples = None,
    temperature: Temperature = None,
    limit: Annotated[int | None, Option(min=1, help="Maximum questions of each set.")] = None,
    verifier: Verifier = "math",
    seed: Annotated[int, Option(min=0, help="Seed of the engine.")] = 0,
    config: Config = None,
    huggingface: Kept = None,
    json_file: Json = None,
    jsonl_file: Jsonl = None,
    fit_file: Fit = None,
    series: Series = None,
) -> None:
    """Evaluate a checkpoint: mean@n, pass@k, majority@n with standard errors, by difficulty.

    Any key of the configuration can follow as a dotted option, such as
    `--generation.answer_budget_tokens 4096`.
    """
    from megatron_rl.commands.convert.resumable import ConvertError
    from megatron_rl.commands.evaluate import results
    from megatron_rl.commands.evaluate.model_source import find_source
    from megatron_rl.config import ConfigError
    from megatron_rl.data.question import DataError
    from megatron_rl.orchestrator import RunError

    try:
        source = find_source(checkpoint, config, context.args)
        if data is None and source.run is None:
            raise ConfigError(f"{source.path} belongs to no run: choose the data with --data")
        if fit_file is not None and not source.compute:
            raise ConfigError(
                f"--fit: how much compute made {source.path} is unknown (no run's folder with a"
                " metrics.jsonl of its step around it); write --json and add the compute yourself"
            )
        g = source.config.generation
        sampling = {
            "samples": samples or source.config.evaluation.samples_per_prompt,
            "temperature": g.temperature if temperature is None else temperature,
            "seed": seed,
            "interruption": g.interruption,
            "thinking_budget_tokens": g.thinking_budget_tokens[1],
            "answer_budget_tokens": g.answer_budget_tokens,
        }
        result, rows = _evaluate(source, data or ["run"], sampling, limit, verifier, huggingface)
    except (ConfigError, ConvertError, DataError, RunError) as e:
        print(f"megatron-rl evaluate: {e}", file=sys.stderr)
        raise typer.Exit(2) from None
    results.show(result)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if jsonl_file is not None:
        results.write_lines(jsonl_file, rows)
    if fit_file is not None:
        name = series or (source.path if source.run is None else source.run.resolve()).name
        results.add_points(fit_file, results.fit_rows(result, name))


def _evaluate(
    source: ModelSource,
    data: list[str],
    sampling: dict[str, Any],
    limit: int | None,
    verifier: str,
    huggingface: Path | None,
) -> tuple[dict[str, Any], list[Row]]:
    """Return the object of --json and the rows of --jsonl."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
    from tokenizers import Tokenizer

    from megatron_rl.commands.evaluate import results
    from megatron_rl.commands.evaluate.evaluation_run import sample_and_verify
    from megatron_rl.commands.evaluate.evaluation_sets import load_sets
    from megatron_rl.commands.evaluate.model_source import huggingface_directory
    from megatron_rl.data import read_format

    config, n = source.config, sampling["samples"]
    with tempfile.TemporaryDirectory(prefix="megatron_rl_") as folder:
        model = huggingface_directory(source, huggingface or Path(folder) / "model")
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        form = read_format(model, config.generation.think_start)
        sets = load_sets(data, config, tokenizer, form, kind=verifier, limit=limit)
        prompts = [prompt for pairs in sets.values() for _, prompt in pairs]
        started = time.monotonic()
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("completions", total=n * len(prompts))
            advance = partial(progress.advance, bar)
            samples = sample_and_verify(config, model, prompts, sampling, advance)
    rows = results.completion_rows(sets, samples, tokenizer, config.generation.think_end)
    by_set = [results.set_results(name, [r for r in rows if r["data"] == name], n) for name in sets]
    if limit is None and source.evaluation is not None:
        by_set = [results.compare_with_run(one, source.evaluation) for one in by_set]
    result = {
        "schema": results.SCHEMA,
        "checkpoint": str(source.path),
        "step": source.step,
        "compute": source.compute,
        "sampling": sampling,
        "seconds": time.monotonic() - started,
        "sets": by_set,
    }
    return result, rows
