"""A worker that is the program `script.py` of its folder (`tests.workers.run_script`)."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main(rank: int, folder: Path) -> None:
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / "script.py"), run_name="__main__")
