"""Architectures by Hugging Face `model_type`: one file each.

`architecture(config)` is the only door; `named_config` gives it the published models. The files
import Megatron-Core where they build its specs, not at the top, so that `models.tiny` and the name
mapping need torch alone.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl import compat

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

compat.install()

ARCHITECTURES = {
    "llama": "megatron_rl.models.llama:Llama",
    "llama4": "megatron_rl.models.llama4:Llama4Multimodal",
    "llama4_text": "megatron_rl.models.llama4:Llama4",
    "qwen3": "megatron_rl.models.qwen3:Qwen3",
    "qwen3_moe": "megatron_rl.models.qwen3_moe:Qwen3Moe",
}
"""`model_type` of a config.json -> module and class."""

CONFIGS = Path(__file__).with_name("configs")
"""The `config.json` of published models, by name."""


def named_configs() -> list[str]:
    """Names that `named_config` knows."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def named_config(name: str) -> dict[str, Any]:
    """The `config.json` of a published model, without a download.

    Example: `architecture(named_config("llama-3.1-8b")).parameters()` is 8030261248.

    Raises:
        ValueError: a name that is not in `named_configs()`.
    """
    if name not in named_configs():
        raise ValueError(f"no model {name!r}: known are {', '.join(named_configs())}")
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return config


def architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """The architecture of a Hugging Face configuration.

    Args:
        hf_config: the contents of `config.json`.

    Raises:
        ValueError: a `model_type` that has no file here, or a feature that its file refuses.
    """
    model_type = hf_config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"config.json has model_type {model_type!r}: known are {', '.join(ARCHITECTURES)};"
            " add a file to megatron_rl/models and name it in ARCHITECTURES"
        )
    module, _, name = ARCHITECTURES[model_type].partition(":")
    made: Architecture = getattr(importlib.import_module(module), name)(hf_config)
    return made
