"""Noise model: neighboring evaluations are correlated, and intervals must account for it.

The covariance of two evaluations i, j of one run, in units of the noise variance, is::

    K_ij = (1 - share) [i = j] + share * exp(-|C_i - C_j| / (LENGTH * median spacing))

`share` is the part of the variance that drifts during the run; the rest is the sampling error of
one evaluation. Thirteen published curves have a share of 0.8 to 1 and a length of 2 to 5 spacings
(`benchmarks/results/scaling_noise.md`). SHARE is the middle of that range, LENGTH its lower end,
which costs least if the noise is independent after all.
"""

import numpy as np

from .curve import Array

SHARE = 0.9
LENGTH = 2.0
FLOOR = 1e-4
"""Smallest noise that is assumed (0.01 percentage points): pass rates are printed to about that."""


def covariance(
    compute: Array, share: float, stderr: Array | None = None, length: float = LENGTH
) -> Array:
    """Return the noise covariance [n, n] with mean diagonal 1.

    `compute` [n] increases; `share` of the variance drifts, 0 (independent) to 1; `stderr` [n] is
    the relative size of the noise (None: equal); `length` is in median spacings.
    """
    n = len(compute)
    k = np.eye(n) * (1 - share)
    if share > 0 and n > 1:
        spacing = float(np.median(np.diff(compute)))
        k += share * np.exp(-np.abs(compute[:, None] - compute[None]) / (length * spacing))
    if stderr is not None:
        scale = stderr / np.sqrt(np.mean(stderr**2))
        k *= scale[:, None] * scale[None]
    return k


def whitener(cov: Array) -> Array:
    """Return the matrix [n, n] that turns noise of covariance `cov` into independent unit noise."""
    return np.asarray(np.linalg.inv(np.linalg.cholesky(cov)))
