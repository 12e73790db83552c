"""`megatron-rl evaluate`: pass rates of a checkpoint on evaluation sets."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from megatron_rl.files import replace_file

app = typer.Typer()

PATH_HELP = "Hugging Face directory, checkpoint of a run, or a run's folder (its newest)."
DATA_HELP = """aime2024, aime2025, math500, livecodebench, NAME=PATH of a local copy, a file, or
`run`: the run's own held-out prompts (default); with @FIRST..LAST, of contests in this range of
dates. Can be repeated."""
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
    from megatron_rl.commands.evaluate import evaluation_run, results
    from megatron_rl.config import ConfigError
    from megatron_rl.data.question import DataError
    from megatron_rl.models import CheckpointError
    from megatron_rl.orchestrator import RunError

    try:
        source = evaluation_run.find_source(checkpoint, config, context.args)
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
        sets = (data or ["run"], limit, verifier)
        result, rows = evaluation_run.evaluate(source, *sets, sampling, huggingface)
    except (CheckpointError, ChildProcessError, ConfigError, DataError, RunError) as e:
        print(f"megatron-rl evaluate: {e}", file=sys.stderr)
        raise typer.Exit(2) from None
    results.show(result)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(json_file, json.dumps(result, indent=1) + "\n")
    if jsonl_file is not None:
        results.write_lines(jsonl_file, rows)
    if fit_file is not None:
        name = series or (source.path if source.run is None else source.run.resolve()).name
        results.add_points(fit_file, results.fit_rows(result, name))
