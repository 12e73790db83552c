"""Architectures by Hugging Face `model_type`: one file each.

`architecture(config)` is the only door. The files import Megatron-Core where they build its
specs, not at the top, so that `models.tiny` and the name mapping need torch alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

ARCHITECTURES = {
    "llama": "megatron_rl.models.llama:Llama",
    "llama4_text": "megatron_rl.models.llama4:Llama4",
}
"""`model_type` of a config.json -> module and class."""


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
