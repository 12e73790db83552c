#!/usr/bin/env python3
"""Run `megatron-rl plan` without an installation: tools/plan_memory.py CONFIG --world 80."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.cli import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
