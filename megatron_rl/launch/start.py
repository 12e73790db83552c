"""The start checkpoint: given, found, or made by the supervised stage."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

from safetensors import safe_open
from tokenizers import Tokenizer

from megatron_rl.config import NAMED_MODELS, TINY_MODELS, ConfigError, RunConfig
from megatron_rl.data.splits import demonstrations
from megatron_rl.models import named_config

MADE_BY = "supervised_stage.json"

Example = tuple[list[int], list[int]]
"""Token ids of a prompt and of its completion."""


def start_directory(config: RunConfig) -> Path:
    """Hugging Face directory that the run starts from; it may not exist yet.

    Raises:
        ConfigError: a given directory is missing or is no model.
    """
    if config.start_checkpoint is not None:
        path = config.start_checkpoint
    elif config.model in TINY_MODELS:
        return config.output_dir / "start" / config.model
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
        wanted = named_config(config.model)["model_type"]
        found = json.loads((path / "config.json").read_text()).get("model_type")
        if found != wanted:
            raise ConfigError(
                f"start_checkpoint: {path} has model_type {found!r} and model = {config.model!r} is"
                f" {wanted!r}; give a checkpoint of that model, or its own directory as model"
            )
    return path


def supervised_fingerprint(config: RunConfig) -> str:
    """Identifies what the supervised stage would make of this configuration."""
    made_from = config.model_dump(mode="json", include={"model", "seed", "tasks", "sft"})
    made_from["thinking"] = config.generation.thinking_budget_tokens[1]
    text = json.dumps(made_from, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def needs_supervised_stage(config: RunConfig) -> bool:
    """Whether the start checkpoint must be made: a tiny model without one made the same way."""
    if config.start_checkpoint is not None or config.model not in TINY_MODELS:
        return False
    mark = start_directory(config) / MADE_BY
    return not mark.exists() or json.loads(mark.read_text()) != _mark(config)


def mark_made(config: RunConfig, directory: Path) -> None:
    """Write into a finished start checkpoint what it was made from."""
    (directory / MADE_BY).write_text(json.dumps(_mark(config)) + "\n")


def _mark(config: RunConfig) -> dict[str, str]:
    return {"fingerprint": supervised_fingerprint(config)}


def examples_by_step(config: RunConfig, tokenizer: Tokenizer) -> Iterator[list[Example]]:
    """`sft.sequences_per_step` demonstrations for each of `sft.steps` steps, in shuffled epochs."""
    s = config.sft

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    pool = [(encode(prompt), encode(completion)) for prompt, completion in demonstrations(config)]
    random.Random(f"supervised order {config.seed}").shuffle(pool)
    stream = cycle(pool)
    for _ in range(s.steps):
        yield list(islice(stream, s.sequences_per_step))


def active_parameters(directory: Path) -> int:
    """Parameters of a Hugging Face model that one token uses: its own experts, and all else."""
    config = json.loads((directory / "config.json").read_text())
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    share = min(config.get("num_experts_per_tok") or 1, experts) / experts
    total = 0.0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                size = math.prod(file.get_slice(name).get_shape())
                total += size * (share if ".experts." in name else 1.0)
    return round(total)
