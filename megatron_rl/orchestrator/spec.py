"""What trainer rank 0 hands to the orchestrator's process."""

from __future__ import annotations

from typing import Any

import msgspec


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the file that the process is started with."""

    config: dict[str, Any]
    model_dir: str
    """Hugging Face directory whose tokenizer is used."""
    bind: str
    """Address to bind, `tcp://127.0.0.1:*`."""
    endpoint_file: str
    """Written, atomically, once the socket is bound; `<endpoint_file>.error` tells a failure."""
    phases: dict[str, float]
    """Wall seconds of what was before, by phase."""
    checkpoint: str = ""
    """Checkpoint folder to go on from."""
