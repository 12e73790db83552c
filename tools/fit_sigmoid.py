#!/usr/bin/env python3
"""`megatron-rl fit` without an installation: `python tools/fit_sigmoid.py data.csv --r0 0.4`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer

from megatron_rl.scaling.cli import fit_command

if __name__ == "__main__":
    typer.run(fit_command)
