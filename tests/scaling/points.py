"""The published points (read off the figures of arXiv 2510.13786) for the tests of the fitter."""

from functools import cache
from pathlib import Path

import numpy as np

from megatron_rl.scaling import Series, read

PATH = Path(__file__).parent / "data" / "scalerl_points.csv"
R0, SKIP = 0.395, 1400.0
"""R0 of every run, and the start that is skipped ("about 1.5k GPU-hours")."""


@cache
def published(name: str) -> Series:
    """Return a series by name; "name+" joins it with its extrapolation markers."""
    series = {s.name: s for s in read(PATH)}
    if not name.endswith("+"):
        return series[name]
    base, ext = series[name[:-1]], series[name[:-1] + "_ext"]
    return Series.clean(
        np.concatenate([base.compute, ext.compute]),
        np.concatenate([base.reward, ext.reward]),
        name=name,
        unit=base.unit,
    )
