"""The file that starts the orchestrator's process."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_rl.data import Prompt


class EvaluateOnly(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluate weights version 0 on these prompts, train nothing (`megatron-rl evaluate`)."""

    heldout: list[Prompt]
    temperature: float
    samples_file: str
    """File for a line of JSON per completion (`evaluation.EvaluatedSample`)."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the file."""

    config: dict[str, Any]
    model_dir: str
    """Hugging Face directory of the tokenizer."""
    bind: str
    """Address to bind, `tcp://127.0.0.1:*`."""
    endpoint_file: str
    """Written atomically once the socket is bound; an error goes to `<endpoint_file>.error`."""
    phases: dict[str, float]
    """Wall seconds of the phases before, by name."""
    checkpoint: str = ""
    """Checkpoint folder to resume from."""
    evaluate_only: EvaluateOnly | None = None
    """None for a run that trains."""
