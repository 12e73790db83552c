"""A run without training on evaluation sets: orchestrator and one generator as child processes.

The model is a Hugging Face directory, or a checkpoint of a training run: its folder holds
`config.yaml`, `metrics.jsonl`, `checkpoints/step_000020/` (complete with a `trainer.json`) and,
after its end, the Hugging Face directory `final/`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from tokenizers import Tokenizer

from megatron_rl import launch
from megatron_rl.commands.convert.resumable import Output
from megatron_rl.commands.evaluate import results
from megatron_rl.config import CONFIG_FILE, ConfigError, RunConfig, load_config
from megatron_rl.data import Prompt, load_prompts, read_format
from megatron_rl.data.prompt_format import PromptFormat
from megatron_rl.data.prompts import make_prompt
from megatron_rl.data.published import load_benchmark
from megatron_rl.data.question import DataError, apply_template
from megatron_rl.generator.supervisor import engine_name
from megatron_rl.metrics.metrics_file import COMPUTE, read_metrics
from megatron_rl.models.run_checkpoint import ABOUT, find_complete, read_about
from megatron_rl.models.start_checkpoint import start_directory
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.child_process import EvaluateOnly, OrchestratorProcess
from megatron_rl.orchestrator.evaluation import EvaluatedSample
from megatron_rl.weights.store import FOLDER_PREFIX, hold, node_name, remove_unused

POLL_SECONDS, GRACE_SECONDS = 0.2, 10.0


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model, its run, and the configuration for sampling."""

    path: Path
    is_megatron: bool
    config: RunConfig
    run: Path | None  # its folder
    step: int | None  # weight version
    compute: dict[str, float] = field(default_factory=dict)  # spent at this version, if known
    evaluation: dict[str, Any] | None = None  # the run's own of this version


def find_source(path: Path, config: Path | None, overrides: list[str]) -> ModelSource:
    """Find the model at a path (of a run: the newest checkpoint), with its run's configuration.

    `config` replaces the run's own file; `overrides` are dotted options on top.

    Raises:
        ConfigError: nothing to evaluate, or an invalid configuration.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory")
    if (path / "checkpoints").is_dir():
        if not (complete := find_complete(path / "checkpoints")):
            raise ConfigError(f"{path}/checkpoints: no complete checkpoint (step_*/trainer.json)")
        path = complete[0]
    is_megatron = (path / ABOUT).is_file()
    run = next((p for p in path.resolve().parents[:2] if (p / CONFIG_FILE).is_file()), None)
    file = config or (run / CONFIG_FILE if run is not None else None)
    if is_megatron and file is None:
        raise ConfigError(
            f"{path}: no {CONFIG_FILE} in the run's folder above it; give the run's configuration"
            " with --config"
        )
    if not is_megatron and not ((path / "config.json").is_file() and [*path.glob("*.safetensors")]):
        raise ConfigError(
            f"{path}: neither a Hugging Face directory (config.json and *.safetensors), nor a"
            " run's folder, nor a complete checkpoint of one (trainer.json); `megatron-rl convert`"
            " makes a Hugging Face directory of a Megatron-LM checkpoint"
        )
    if file is None:
        overrides = ["--model", str(path), *overrides]
    if run is None:
        return ModelSource(path, is_megatron, load_config(file, overrides), run, None)
    step = None
    if is_megatron:
        try:
            step = read_about(path)["step"]
        except (FileNotFoundError, ValueError) as e:
            raise ConfigError(str(e)) from None
    elif path.resolve() == run / "final" and (run / "summary.json").is_file():
        step = json.loads((run / "summary.json").read_text())["steps"]
    settings = load_config(file, ["--output_dir", str(run), *overrides])  # it may have moved
    rows = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    evaluations = [r for r in rows if r["kind"] == "eval" and r["step"] == step]
    steps = [r for r in rows if r["kind"] == "step" and r["step"] + 1 == step]
    last = [*steps, *evaluations][-1:]
    compute = {name: row[name] for row in last for name in COMPUTE if name in row}
    evaluation = evaluations[-1] if evaluations else None
    return ModelSource(path, is_megatron, settings, run, step, compute, evaluation)


def evaluate(
    source: ModelSource,
    names: list[str],
    limit: int | None,
    kind: str,
    sampling: dict[str, Any],
    huggingface: Path | None,
) -> tuple[dict[str, Any], list[results.Row]]:
    """Evaluate a model on sets of these names; return the object of --json and rows of --jsonl.

    `limit` and `kind` are those of `load_sets`, `sampling` is that of `sample_and_verify`, and
    `huggingface` is a folder that keeps the conversion.

    Raises:
        ConvertError: a checkpoint that cannot be converted.
        DataError: as from `load_sets`.
        RunError: as from `sample_and_verify`.
    """
    config, n = source.config, sampling["samples"]
    remove_unused(Path(tempfile.gettempdir()), FOLDER_PREFIX)  # of those that were killed
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        hold(Path(folder))
        model = source.path
        if source.is_megatron:
            from megatron_rl.commands.convert.to_huggingface import convert

            output = Output(huggingface or Path(folder) / "model", 10**9, quiet=True)
            model = convert(source.path, output, start_directory(source.config))
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        form = read_format(model, config.generation.think_start)
        sets = load_sets(names, config, tokenizer, form, kind=kind, limit=limit)
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
    return {
        "schema": results.SCHEMA,
        "checkpoint": str(source.path),
        "step": source.step,
        "compute": source.compute,
        "sampling": sampling,
        "seconds": time.monotonic() - started,
        "sets": by_set,
    }, rows


def load_sets(
    names: list[str],
    config: RunConfig,
    tokenizer: Tokenizer,
    form: PromptFormat,
    *,
    kind: str,
    limit: int | None,
) -> results.Sets:
    """Load at most `limit` questions of each set; the run's held-out prompts are a set per task.

    A name is `run`, or an entry of `data.published.load_benchmark` with the verifier `kind`.

    Raises:
        DataError: no such set, one that cannot be read, or two of one name.
    """
    sets: results.Sets = {}
    for name in names:
        new: results.Sets = {}
        if name == "run":
            heldout = load_prompts(config, tokenizer, form).heldout
            several = len({p.task for p in heldout}) > 1
            for p in heldout:
                new.setdefault(f"run/{p.task}" if several else "run", []).append((str(p.id), p))
        else:
            file = name.partition("=")[0]
            label = Path(file).stem if file.endswith(".jsonl") else file
            numbered = enumerate(apply_template(q, None) for q in load_benchmark(name, kind=kind))
            new[label] = [(q.id, make_prompt(q, i, label, tokenizer, form)) for i, q in numbered]
        if doubled := sets.keys() & new:
            raise DataError(f"evaluation sets: {', '.join(doubled)} is named twice")
        sets |= new
    return {label: prompts[:limit] for label, prompts in sets.items()}


def sample_and_verify(
    config: RunConfig,
    model: Path,
    prompts: list[Prompt],
    sampling: dict[str, Any],
    advance: Callable[[int], None],
) -> list[EvaluatedSample]:
    """Sample and verify completions and return them by prompt and number.

    `sampling` has `samples` of each prompt, `temperature` and `seed`; `advance` is called with the
    number of new verdicts.

    Raises:
        RunError: a verifier or the generator failed, or a time-out; with the cause.
        ChildProcessError: the orchestrator was killed, or failed in another way.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the processes as Ctrl-C does
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)))
        hold(folder)
        config = _without_training(config, folder, prompts, sampling)
        path = folder / "samples.jsonl"
        path.touch()
        lines = stack.enter_context(path.open("rb"))
        heldout = [replace(prompt, id=i) for i, prompt in enumerate(prompts)]
        temperature = sampling["temperature"]
        only = EvaluateOnly(heldout=heldout, temperature=temperature, samples_file=str(path))
        python = launch.generator_python(config) or sys.executable
        orchestrator = OrchestratorProcess(config, model, {}, None, node_name(), only)
        stack.push(orchestrator.kill_on_error)
        command = [python, "-m", "megatron_rl.cli", "generate", "--name", engine_name(0)]
        command += ["--join", str(orchestrator.endpoint_file), "--agent", str(os.getpid())]
        generator = subprocess.Popen(command)
        stack.callback(generator.wait)
        stack.callback(generator.kill)
        alive = time.monotonic()
        while orchestrator.ended() is None:
            time.sleep(POLL_SECONDS)
            advance(lines.read().count(b"\n"))
            if generator.poll() is None:
                alive = time.monotonic()
            elif time.monotonic() - alive > GRACE_SECONDS:
                status = generator.returncode
                raise RunError(f"the generator ended with exit status {status}; see its log")
        orchestrator.wait(GRACE_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            generator.wait(config.timeouts.shutdown_seconds)
        lines.seek(0)
        samples = [msgspec.json.decode(line, type=EvaluatedSample) for line in lines]
    return sorted(samples, key=lambda pair: (pair[0].prompt_id, pair[0].index))


def _without_training(
    config: RunConfig, folder: Path, prompts: list[Prompt], sampling: dict[str, Any]
) -> RunConfig:
    """Return the configuration of a run with one engine and its own folder."""
    longest = max([config.generation.max_prompt_tokens, *(len(p.token_ids) for p in prompts)])
    changes: dict[str, dict[str, Any]] = {
        "generation": {"max_prompt_tokens": longest},
        "evaluation": {"samples_per_prompt": sampling["samples"]},
        "roles": {"generator_ranks": config.roles.generator_tensor_parallel},
        "metrics": {"terminal": "off", "wandb": "off", "tensorboard": False},
    }
    sections = {k: getattr(config, k).model_copy(update=v) for k, v in changes.items()}
    return config.model_copy(update={**sections, "output_dir": folder, "seed": sampling["seed"]})
