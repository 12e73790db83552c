"""Three families of curves of pass rate against compute, and their derivatives.

Every family is linear in two rewards and non-linear in at most two shape parameters::

    R(C) = R0 + (A - R0) * g(C; u, v)          0 <= g <= 1, non-decreasing in C

=================  ==============================================  ====================
form               formula                                         shape (u, v)
=================  ==============================================  ====================
``log-sigmoid``    ``R0 + (A - R0) / (1 + (Cmid/C)^B)``            ln Cmid, ln B
``linear-sigmoid`` ``R0 + (A - R0) / (1 + exp(-B (C - Cmid)))``    Cmid/s, ln(B s)
``power-law``      ``A - D / C^B``                                 none, ln B
=================  ==============================================  ====================

``log-sigmoid`` is Equation 1 of arXiv 2510.13786; ``power-law`` is its limit at high compute with
``D = (A - R0) Cmid^B``; ``linear-sigmoid`` is the form that popular summaries print. ``s`` is the
largest compute of the data, so that every fit is independent of the unit of compute.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from .options import FormName

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Index = NDArray[np.intp]

MIN_B, MAX_B = 0.1, 20.0  # bounds of B in every fit; the published values lie between 1 and 5.2


def log_sigmoid(compute: ArrayLike, A: float, B: float, Cmid: float, R0: float) -> Array:
    """Return Equation 1 at `compute`, in the unit of `Cmid`; it is R0 at compute 0."""
    with np.errstate(divide="ignore"):
        x = np.log(np.asarray(compute, dtype=float))
    return R0 + (A - R0) * np.asarray(expit(B * (x - np.log(Cmid))))


@dataclass(frozen=True, slots=True)
class Shape:
    """A family scaled to one series: maps compute to g(C; u, v) and back.

    `scale` is the largest compute of the series, `anchor` the smallest positive one.
    For the power law the pair (R0, A) is (value at `anchor`, asymptote).
    """

    form: FormName
    scale: float
    anchor: float

    @property
    def has_u(self) -> bool:
        """True if the family has a midpoint."""
        return self.form != "power-law"

    def x(self, compute: ArrayLike) -> Array:
        """Return the abscissa of the family: ln C, or C/scale."""
        c = np.asarray(compute, dtype=float)
        if self.form == "linear-sigmoid":
            return c / self.scale
        with np.errstate(divide="ignore"):
            return np.log(c)

    def g(self, x: Array, u: Array | float, v: Array | float) -> Array:
        """Return the share of the gain reached at abscissa x [broadcast of x, u, v]."""
        if self.form == "power-law":
            return -np.expm1(-np.exp(v) * (x - np.log(self.anchor)))
        return np.asarray(expit(np.exp(v) * (x - u)))

    def dg(self, x: Array, u: Array | float, v: Array | float) -> tuple[Array, Array]:
        """Return the derivatives of g by u and by v [broadcast of x, u, v]."""
        b = np.exp(v)
        if self.form == "power-law":
            t = x - np.log(self.anchor)
            slope = b * t * np.exp(-b * t)
            return np.zeros_like(slope), slope
        g = self.g(x, u, v)
        slope = b * g * (1 - g)
        return -slope, slope * np.where(np.isfinite(x), x - u, 0.0)

    def bounds(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the ranges of u and v; Cmid: a tenth of the first to 100 times the last point."""
        if self.form == "linear-sigmoid":
            return (-2.0, 20.0), (np.log(0.05), np.log(200.0))
        if self.form == "power-law":
            return (0.0, 0.0), (np.log(0.02), np.log(MAX_B))
        lo, hi = np.log(self.anchor / 10), np.log(self.scale * 100)
        return (float(lo), float(hi)), (float(np.log(MIN_B)), float(np.log(MAX_B)))

    def b(self, v: Array | float) -> Array:
        """Return B in the unit of the formula (per unit of compute for the linear sigmoid)."""
        return np.exp(v) / (self.scale if self.form == "linear-sigmoid" else 1.0)

    def cmid(self, u: Array | float) -> Array:
        """Return Cmid in the unit of compute."""
        return np.asarray(u * self.scale if self.form == "linear-sigmoid" else np.exp(u))

    def u(self, cmid: float) -> float:
        """Invert `cmid`."""
        return float(cmid / self.scale if self.form == "linear-sigmoid" else np.log(cmid))

    def invert(self, share: Array, u: Array, v: Array) -> Array:
        """Return the compute at which g is `share`: inf for a share >= 1, 0 for one below g(0)."""
        share = np.asarray(share, dtype=float)
        inside = np.clip(share, 1e-12, 1 - 1e-12)
        if self.form == "power-law":
            c = self.anchor * np.exp(-np.log1p(-inside) / np.exp(v))
        else:
            x = u + (np.log(inside) - np.log1p(-inside)) / np.exp(v)
            c = x * self.scale if self.form == "linear-sigmoid" else np.exp(np.minimum(x, 700.0))
        return np.where(share <= 0, 0.0, np.where(share >= 1, np.inf, np.maximum(c, 0.0)))
