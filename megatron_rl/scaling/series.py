"""The checked evaluations of one run: every reader returns them, every fit starts from them.

Noise model: neighboring evaluations are correlated, and intervals must account for it.

The covariance of two evaluations i, j of one run, in units of the noise variance, is::

    K_ij = (1 - share) [i = j] + share * exp(-|C_i - C_j| / (LENGTH * median spacing))

`share` is the part of the variance that drifts during the run; the rest is the sampling error of
one evaluation. Thirteen published curves have a share of 0.8 to 1 and a length of 2 to 5 spacings
(`benchmarks/results/scaling_noise.md`). SHARE is the middle of that range, LENGTH its lower end,
which costs least if the noise is independent after all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from .curve import Array, Index, Mask
from .errors import PointsError

SHARE = 0.9
LENGTH = 2.0
FLOOR = 1e-4  # smallest noise that is assumed: pass rates are printed to about 0.0001


@dataclass(frozen=True, slots=True)
class Series:
    """Evaluations of one run in increasing compute; pass rates are fractions of 1."""

    compute: Array  # compute spent [n], in `unit`; may start at 0
    reward: Array  # pass rate [n] in [0, 1]
    stderr: Array | None = None  # standard error of each pass rate [n], or None if unknown
    epoch: Array | None = None  # passes over the prompts begun before each one [n], if known
    name: str = ""
    unit: str = "compute"
    source: str | None = None
    repairs: tuple[str, ...] = ()  # changes that were made to the input; printed with every result

    def __len__(self) -> int:
        return len(self.compute)

    def take(self, points: Mask | Index | slice) -> "Series":
        """Return a part of the points."""
        s, e = (None if x is None else x[points] for x in (self.stderr, self.epoch))
        c, r = self.compute[points], self.reward[points]
        return replace(self, compute=c, reward=r, stderr=s, epoch=e)

    @classmethod
    def clean(
        cls,
        compute: ArrayLike,
        reward: ArrayLike,
        stderr: ArrayLike | None = None,
        *,
        epoch: ArrayLike | None = None,
        name: str = "",
        unit: str = "compute",
        source: str | None = None,
        lines: Sequence[int] | None = None,
        columns: tuple[str, str, str] = ("compute", "reward", "stderr"),
        repairs: Sequence[str] = (),
    ) -> "Series":
        """Check and order the points; sorting and merging of repeats are stated in `repairs`.

        Raises:
            PointsError: NaN or infinite values, negative compute, pass rates outside [0, 1],
                standard errors that are not positive, lengths that differ.
        """
        c, r = (np.asarray(x, float).ravel() for x in (compute, reward))
        s, e = (None if x is None else np.asarray(x, float).ravel() for x in (stderr, epoch))
        if not len(c) == len(r) == len(r if s is None else s):
            sizes = f"{len(c)} compute, {len(r)} reward"
            sizes += "" if s is None else f", {len(s)} standard errors"
            raise PointsError(f"lengths differ: {sizes}", "Give one value of each per evaluation")
        if len(c) == 0:
            raise PointsError("no evaluations", "Give at least four points", file=source)
        for column, values, bad, problem, remedy in _checks(c, r, s):
            if bad.any():
                i = int(np.argmax(bad))
                line = None if lines is None else lines[i]
                text = f"{problem} ({values[i]:g}" + (f" at index {i})" if line is None else ")")
                raise PointsError(text, remedy, file=source, line=line, column=columns[column])
        notes = [*repairs]
        if np.any(np.diff(c) < 0):
            back = c[np.argmax(np.diff(c) < 0) + 1]
            remedy = "if it starts again after a resume, add the compute before it"
            notes.append(f"sorted by compute, which goes back to {back:g}: {remedy}")
            order = np.argsort(c, kind="stable")
            c, r = c[order], r[order]
            s, e = (None if x is None else x[order] for x in (s, e))
        if np.any(np.diff(c) == 0):
            e = None if e is None else e[np.unique(c, return_index=True)[1]]
            c, r, s, merged = _merge(c, r, s)
            notes.append(f"{merged} rows at a repeated compute merged into their mean")
        return cls(c, r, s, e, name, unit, source, tuple(notes))


def _checks(c: Array, r: Array, s: Array | None) -> Iterator[tuple[int, Array, Mask, str, str]]:
    """Yield column, values, mask of the bad ones, problem and remedy of each check."""
    fix, start = "Correct or remove the row", "Give compute since the start of the run"
    yield 0, c, ~np.isfinite(c), "compute is not a finite number", fix
    yield 0, c, c < 0, "compute is negative", start
    yield 1, r, ~np.isfinite(r), "pass rate is not a finite number", fix
    percent = "Give fractions, or --percent; of other rewards divide by the largest possible one"
    if len(r) and np.nanmin(r) < 0:
        percent = "This is no pass rate: of rewards of -1 and 1 give (1 + reward) / 2"
    yield 1, r, (r < 0) | (r > 1), "pass rate outside [0, 1]", percent
    if s is not None:
        yield 2, s, ~np.isfinite(s) | (s <= 0), "standard error is not a positive number", fix


def _merge(c: Array, r: Array, s: Array | None) -> tuple[Array, Array, Array | None, int]:
    """Average the rows at equal compute, by inverse variance where it is known."""
    unique, group = np.unique(c, return_inverse=True)
    weight = np.ones_like(r) if s is None else s**-2
    total, counts = np.bincount(group, weight), np.bincount(group)
    mean = np.bincount(group, weight * r) / total
    error = None if s is None else np.asarray(1 / np.sqrt(total))
    return unique, np.asarray(mean), error, int(counts[counts > 1].sum())


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
