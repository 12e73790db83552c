#!/usr/bin/env python3
"""`megatron-rl data prepare` without an installation.

python tools/prepare_data.py polaris data/polaris --against aime2024 --against math500
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer

from megatron_rl.commands.prepare import prepare_command

if __name__ == "__main__":
    typer.run(prepare_command)
