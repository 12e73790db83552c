"""Compute-performance curves of RL runs: fit early, predict late, with intervals.

Independent of the other packages: needs numpy and scipy only, no torch. See docs/scaling.md. Names
are loaded on first use, so that the command line starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparison import compare as compare
    from .curve import log_sigmoid as log_sigmoid
    from .errors import PointsError as PointsError
    from .fit_result import Fit as Fit
    from .fitting import fit as fit
    from .forecasting import forecast as forecast
    from .io import read as read
    from .series import Series as Series

_MODULES = {
    "Fit": "fit_result",
    "PointsError": "errors",
    "Series": "series",
    "compare": "comparison",
    "fit": "fitting",
    "forecast": "forecasting",
    "log_sigmoid": "curve",
    "read": "io",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
