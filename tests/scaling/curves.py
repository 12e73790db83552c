"""The other two families as plain formulas, which fits of their points must recover."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import expit


def linear_sigmoid(compute: Any, A: float, B: float, Cmid: float, R0: float) -> Any:
    """Return the logistic curve in linear compute; `B` is per unit of compute."""
    return R0 + (A - R0) * np.asarray(expit(B * (np.asarray(compute, dtype=float) - Cmid)))


def power_law(compute: Any, A: float, B: float, D: float) -> Any:
    """Return the saturating power law `A - D / C^B`; minus infinity at compute 0."""
    with np.errstate(divide="ignore"):
        return A - D * np.asarray(compute, dtype=float) ** -B
