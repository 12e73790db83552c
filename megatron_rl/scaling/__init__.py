"""Compute-performance curves of RL runs: fit early, predict late, and say how sure.

Stands alone: numpy and scipy only, no torch. See docs/scaling.md. Names are loaded on first use, so
that the command line starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparison import compare as compare
    from .curve import linear_sigmoid as linear_sigmoid
    from .curve import log_sigmoid as log_sigmoid
    from .curve import power_law as power_law
    from .errors import DataError as DataError
    from .errors import MissingExtra as MissingExtra
    from .fitting import Fit as Fit
    from .fitting import Interval as Interval
    from .fitting import Prediction as Prediction
    from .fitting import fit as fit
    from .forecasting import forecast as forecast
    from .io import read as read
    from .series import Series as Series

_HOME = {
    "DataError": "errors",
    "Fit": "fitting",
    "Interval": "fitting",
    "MissingExtra": "errors",
    "Prediction": "fitting",
    "Series": "series",
    "compare": "comparison",
    "fit": "fitting",
    "forecast": "forecasting",
    "linear_sigmoid": "curve",
    "log_sigmoid": "curve",
    "power_law": "curve",
    "read": "io",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
