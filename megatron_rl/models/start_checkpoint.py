"""The start checkpoint: given by the user, or made by the supervised stage."""

import hashlib
import json
from pathlib import Path

from megatron_rl.config import NAMED_MODELS, ConfigError, RunConfig
from megatron_rl.files import replace_file
from megatron_rl.kernels.build import cache_directory
from megatron_rl.models import named_config

MADE_BY = "supervised_stage.json"
FETCHED_MODELS = ("smollm2-135m",)  # published models that `megatron-rl model fetch` makes


def fetched_folder(name: str) -> Path:
    """Return the Hugging Face directory of a fetched model, in the user's cache."""
    return cache_directory() / "models" / name


def start_directory(config: RunConfig) -> Path:
    """Return the Hugging Face directory that the run starts from; it may not exist yet.

    Raises:
        ConfigError: a given directory is missing or is not a model.
    """
    return config.made_start or base_directory(config)


def base_directory(config: RunConfig) -> Path:
    """Return the Hugging Face directory that is given, for the supervised stage or the run.

    Raises:
        ConfigError: it is missing or is not a model.
    """
    if config.start_checkpoint is not None:
        path = config.start_checkpoint
    elif config.model in FETCHED_MODELS:
        path = fetched_folder(config.model)
        if not path.exists():
            raise ConfigError(
                f"model: {path} is missing: `megatron-rl model fetch {config.model}` makes it"
            )
    elif config.model in NAMED_MODELS:
        raise ConfigError(
            f"start_checkpoint is missing: model = {config.model!r} names a configuration without"
            " weights; give the Hugging Face directory that training starts from"
        )
    else:
        path = Path(config.model)
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).exists():
            raise ConfigError(
                f"start_checkpoint: {path} has no {name}; give a Hugging Face model directory"
            )
    if config.model in NAMED_MODELS:
        expected = named_config(config.model)["model_type"]
        actual = json.loads((path / "config.json").read_text()).get("model_type")
        if actual != expected:
            raise ConfigError(
                f"start_checkpoint: {path} has model_type {actual!r} and model = {config.model!r}"
                f" is {expected!r}; give a checkpoint of that model, or its own directory as model"
            )
    return path


def _mark(config: RunConfig) -> dict[str, str]:
    """Return a hash of everything that determines the result of the supervised stage."""
    keys = {"model", "start_checkpoint", "seed", "tasks", "sft"}
    made_from = config.model_dump(mode="json", include=keys)
    made_from["thinking"] = config.generation.thinking_budget_tokens[1]
    text = json.dumps(made_from, sort_keys=True)
    return {"fingerprint": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def needs_supervised_stage(config: RunConfig) -> bool:
    """Return True for a run that makes its start and has none of the same fingerprint."""
    if config.made_start is None:
        return False
    mark = config.made_start / MADE_BY
    return not mark.exists() or json.loads(mark.read_text()) != _mark(config)


def mark_made(config: RunConfig, directory: Path) -> None:
    """Write the fingerprint into a finished start checkpoint."""
    replace_file(directory / MADE_BY, json.dumps(_mark(config)) + "\n")
