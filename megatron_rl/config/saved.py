"""The configuration that a run keeps in its folder: `config.yaml`, a file like any other.

It has every key, so that it means the same when defaults change. A resumed run replaces it.
"""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from megatron_rl.config.run import RunConfig

NAME = "config.yaml"


def save_config(config: RunConfig) -> Path:
    """Write the configuration into the run's folder, atomically."""
    # `resume` belongs to one start of a run, not to the run.
    values = config.model_dump(mode="json", exclude={"resume"})
    path = config.output_dir / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_suffix(".yaml.tmp")
    text = yaml.safe_dump(values, sort_keys=False, width=100, allow_unicode=True)
    work.write_text(text, encoding="utf-8")
    os.replace(work, path)
    return path
