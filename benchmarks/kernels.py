"""Benchmark of the kernels: the program is the folder beside this file (`kernels/__main__.py`)."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_suffix("")), run_name="__main__")
