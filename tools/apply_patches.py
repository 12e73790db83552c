#!/usr/bin/env python3
"""Patches of upstream wheels, from a checkout and without an installation of the package.

    python tools/apply_patches.py list | check | apply | reverse  [NAME ...] [--site DIR]

Works on the wheels of the interpreter that runs it. See `patches/README.md`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.patching.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
