#!/usr/bin/env python3
"""Run `megatron-rl convert` without an installation: tools/convert_checkpoint.py SOURCE TARGET."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer

from megatron_rl.commands.convert.cli import convert_command

if __name__ == "__main__":
    typer.run(convert_command)
