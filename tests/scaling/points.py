"""The published points (read off the figures of arXiv 2510.13786) for the tests of the fitter."""

from functools import cache

from megatron_rl.scaling import Series
from megatron_rl.scaling.paper_points import POINTS as PATH
from megatron_rl.scaling.paper_points import published_series

__all__ = ["PATH", "R0", "SKIP", "published"]
R0, SKIP = 0.395, 1400.0
"""R0 of every run, and the start that is skipped ("about 1.5k GPU-hours")."""
every = cache(published_series)


def published(name: str) -> Series:
    """Return a series by name; "name+" joins it with its extrapolation markers."""
    return every()[name]
