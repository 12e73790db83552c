"""The configuration that a run keeps in its folder: `config.yaml`, to be read like any other.

It holds every key, defaults included, so it says the same when defaults change. A resumed run
writes it anew. It is replaced as a whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from megatron_rl.config.run import RunConfig

NAME = "config.yaml"


def save_config(config: RunConfig) -> Path:
    """Write the configuration into the run's folder."""
    # `resume` belongs to one start of a run, not to the run.
    values = config.model_dump(mode="json", exclude={"resume"})
    path = config.output_dir / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_suffix(".yaml.tmp")
    text = yaml.safe_dump(values, sort_keys=False, width=100, allow_unicode=True)
    work.write_text(text, encoding="utf-8")
    os.replace(work, path)
    return path
