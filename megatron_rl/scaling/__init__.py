"""Compute-performance curves of RL runs: fit early, predict late, and say how sure.

Stands alone: numpy and scipy only, no torch. See docs/scaling.md.
"""

from .curve import FORMS, linear_sigmoid, log_sigmoid, power_law
from .errors import DataError, MissingExtra
from .fit import RUN_MARGIN, Fit, Interval, Prediction, fit
from .series import Series

__all__ = [
    "FORMS",
    "RUN_MARGIN",
    "DataError",
    "Fit",
    "Interval",
    "MissingExtra",
    "Prediction",
    "Series",
    "fit",
    "linear_sigmoid",
    "log_sigmoid",
    "power_law",
]
