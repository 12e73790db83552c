"""What is evaluated: a Hugging Face directory, or a training run's checkpoint.

A run's folder holds `config.yaml`, `metrics.jsonl`, `checkpoints/step_000020/` (complete when it
has a `trainer.json`) and, after its end, the Hugging Face directory `final/`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError, RunConfig, load_config
from megatron_rl.config.saved import NAME as CONFIG

COMPUTE = ("compute_tokens", "compute_device_hours", "compute_flops", "wall_seconds")


@dataclass(frozen=True, slots=True)
class Source:
    """A model, the run that made it, and the configuration that it is sampled with."""

    path: Path
    """Hugging Face directory, or a run's checkpoint `step_*`."""
    is_megatron: bool
    config: RunConfig
    run: Path | None = None
    """Folder of the run."""
    step: int | None = None
    """Optimizer steps that made the weights."""


def find_source(path: Path, config: Path | None, overrides: list[str]) -> Source:
    """The model at a path, with its run's configuration.

    Args:
        path: Hugging Face directory, checkpoint folder, or a run's folder: then its newest.
        config: file to use instead of the run's own.
        overrides: dotted options on top.

    Raises:
        ConfigError: nothing that can be evaluated, or a configuration that does not fit.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory")
    if (path / "checkpoints").is_dir():
        path = _newest(path / "checkpoints")
    run = _run_of(path)
    file = config or (run / CONFIG if run is not None else None)
    if (path / "trainer.json").is_file():
        if file is None:
            raise ConfigError(
                f"{path}: no {CONFIG} in the run's folder above it; give the run's configuration"
                " with --config"
            )
        step = int(json.loads((path / "trainer.json").read_text())["step"])
        return Source(path, True, _loaded(file, run, overrides), run, step)
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{path}: neither a Hugging Face directory (config.json and *.safetensors), nor a"
            " run's folder, nor a complete checkpoint of one (trainer.json); a checkpoint of"
            " Megatron-LM becomes a Hugging Face directory with `megatron-rl convert`"
        )
    if file is None:
        overrides = ["--model", str(path), *overrides]
    return Source(path, False, _loaded(file, run, overrides), run, _final_step(path, run))


def _newest(folder: Path) -> Path:
    steps = [p for p in folder.glob("step_*") if p.name.removeprefix("step_").isdigit()]
    complete = [p for p in steps if (p / "trainer.json").is_file()]
    if not complete:
        raise ConfigError(f"{folder}: no complete checkpoint (step_*/trainer.json) in it")
    return max(complete, key=lambda p: int(p.name.removeprefix("step_")))


def _run_of(path: Path) -> Path | None:
    above = path.resolve().parents[:2]
    return next((p for p in above if (p / CONFIG).is_file()), None)


def _loaded(file: Path | None, run: Path | None, overrides: list[str]) -> RunConfig:
    # The run's folder may have moved since.
    moved = ["--output_dir", str(run)] if run is not None else []
    return load_config(file, [*moved, *overrides])


def _final_step(path: Path, run: Path | None) -> int | None:
    """The step of a run's `final`, from its summary."""
    if run is None or path.resolve() != run / "final" or not (run / "summary.json").is_file():
        return None
    steps = json.loads((run / "summary.json").read_text()).get("steps")
    return None if steps is None else int(steps)


def huggingface_directory(source: Source, target: Path) -> Path:
    """A Hugging Face directory of the model: itself, or `target`, converted from the checkpoint.

    Raises:
        ConvertError: the checkpoint is not complete, or not of the run's model.
    """
    if not source.is_megatron:
        return source.path
    from megatron_rl.commands.convert import to_huggingface
    from megatron_rl.models.start_checkpoint import start_directory

    like = start_directory(source.config)
    shard_bytes = 5 * 10**9
    return to_huggingface.convert(source.path, target, like, shard_bytes, None, 1, _say_nothing)


def _say_nothing(line: str) -> None:
    return None


def metrics_of(source: Source) -> list[dict[str, Any]]:
    """The rows of the run's metrics; none without a run."""
    from megatron_rl.metrics.metrics_file import read_metrics

    if source.run is None or not (source.run / "metrics.jsonl").is_file():
        return []
    return read_metrics(source.run / "metrics.jsonl")


def compute_at(step: int | None, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Compute that the run had spent when the weights of a step were made; empty if unknown."""
    for row in reversed(rows):
        made = row["kind"] == "step" and row["step"] + 1 == step
        if made or (row["kind"] == "eval" and row["step"] == step):
            return {name: row[name] for name in COMPUTE if name in row}
    return {}


def evaluation_at(step: int | None, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The run's own evaluation of a step."""
    found = [r for r in rows if r["kind"] == "eval" and r["step"] == step]
    return found[-1] if found else None
