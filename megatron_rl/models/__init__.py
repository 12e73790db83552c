"""Architectures by Hugging Face `model_type`: `architecture(config)` makes them.

Megatron-Core is imported inside functions that build its specs, so `models.tiny` and the mapping of
names need torch only.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl import compat
from megatron_rl.config import NAMED_MODELS, TINY_MODELS

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

compat.install()

ARCHITECTURES = {
    "llama": "megatron_rl.models.llama:Llama",
    "llama4": "megatron_rl.models.llama4:Llama4Multimodal",
    "llama4_text": "megatron_rl.models.llama4:Llama4",
    "qwen3": "megatron_rl.models.qwen3:Qwen3",
    "qwen3_moe": "megatron_rl.models.qwen3:Qwen3Moe",
}
"""`model_type` of a config.json -> module and class."""

CONFIG_FOLDER = Path(__file__).with_name("configs")
"""The `config.json` of published models and of `tiny` ones, by name."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; names the file or tensor, and the remedy."""


def named_config(name: str) -> dict[str, Any]:
    """Return the `config.json` of a published or a tiny model, without a download.

    Example: `architecture(named_config("llama-3.1-8b")).parameters()` is 8030261248.

    Raises:
        ValueError: neither one of `config.NAMED_MODELS` nor of `config.TINY_MODELS`.
    """
    known = (*NAMED_MODELS, *TINY_MODELS)
    if name not in known:
        raise ValueError(f"no model {name!r}: known are {', '.join(known)}")
    config: dict[str, Any] = json.loads((CONFIG_FOLDER / f"{name}.json").read_text())
    return config


def architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """Return the architecture for the contents of a `config.json`.

    Raises:
        ValueError: an unknown `model_type`, or a feature that its file does not implement.
    """
    model_type = hf_config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"config.json has model_type {model_type!r}: known are {', '.join(ARCHITECTURES)};"
            " add a file to megatron_rl/models and name it in ARCHITECTURES"
        )
    result: Architecture = pkgutil.resolve_name(ARCHITECTURES[model_type])(hf_config)
    return result
