"""The model to evaluate: a Hugging Face directory, or a checkpoint of a training run.

A run's folder holds `config.yaml`, `metrics.jsonl`, `checkpoints/step_000020/` (complete with a
`trainer.json`) and, after its end, the Hugging Face directory `final/`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config import CONFIG_FILE, ConfigError, RunConfig, load_config
from megatron_rl.metrics.metrics_file import COMPUTE, read_metrics
from megatron_rl.models.run_checkpoint import ABOUT, find_complete, read_about


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
