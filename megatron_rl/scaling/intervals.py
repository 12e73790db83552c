"""Intervals, bands and draws averaged over two noise models: independent and correlated.

Twenty evaluations do not determine whether neighbors are correlated, so both models are fitted
(`series.py`), weighted by prior times evidence, and their profile likelihoods are averaged in the
tails: the bound y solves ``sum_k w_k tail_k(y) = (1 - level)/2``, the model-averaged profile
interval of Fletcher and Turek (2012, JABES 17:38). `tail_k` comes from the interval ends of model k
on a ladder of levels.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from .curve import Array
from .likelihood import Curves, LikelihoodMap, build_map
from .series import SHARE, Series, covariance, whitener
from .solve import FitProblem, Point

# Tail probabilities of the ladder.
TAILS = np.array([0.0002, 0.001, 0.0025, 0.006, 0.0125, 0.025, 0.04, 0.07, 0.13, 0.25, 0.45])


@dataclass(frozen=True, slots=True)
class ModelAverage:
    """The fitted noise models and their probabilities."""

    maps: tuple[LikelihoodMap, ...]
    weights: tuple[float, ...]
    correlated: float  # probability of correlated noise

    @property
    def sigma(self) -> float:
        """Noise of one evaluation (standard deviation, in pass rate)."""
        pairs = zip(self.weights, self.maps, strict=True)
        return float(np.sqrt(sum(w * m.sigma**2 for w, m in pairs)))

    def intervals(self, level: float) -> dict[str, tuple[float, float]]:
        """Return the model-averaged profile intervals of "a", "r0", "u" and "v"."""
        ends = [np.array([m.intervals(float(lv)) for lv in 1 - 2 * TAILS]) for m in self.maps]
        tail = (1 - level) / 2
        lo = _average([e[..., 0] for e in ends], self.weights, tail)
        hi = -_average([-e[..., 1] for e in ends], self.weights, tail)
        return {k: (float(a), float(b)) for k, a, b in zip(Curves._fields, lo, hi, strict=True)}

    def mean(self, compute: Array) -> Array:
        """Return the average of the plausible curves [m]."""
        pairs = zip(self.weights, self.maps, strict=True)
        return np.asarray(sum(w * m.mean_curve(compute) for w, m in pairs))

    def curve_band(self, compute: Array, level: float) -> tuple[Array, Array]:
        """Return the interval of the noiseless curve [m]; both bounds rise with compute."""
        ranges = [m.curve_range(compute, 1 - 2 * TAILS) for m in self.maps]
        lo = _average([r[0] for r in ranges], self.weights, (1 - level) / 2)
        hi = -_average([-r[1] for r in ranges], self.weights, (1 - level) / 2)
        mean = self.mean(compute)
        return np.minimum(lo, mean), np.maximum(hi, mean)

    def band(self, compute: Array, level: float, noise: Array | float = 1.0) -> tuple[Array, Array]:
        """Return the interval of an evaluation [m]: curve and noise added in quadrature.

        `noise` scales sigma, for evaluations of other sizes than the mean one [m].
        """
        low, high = self.curve_band(compute, level)
        mean = self.mean(compute)
        t = float(stdtrit(self.maps[0].problem.dof, (1 + level) / 2)) * self.sigma * noise
        return mean - np.hypot(mean - low, t), mean + np.hypot(high - mean, t)

    def draw(self, n: int, seed: int = 0) -> Curves:
        """Draw n plausible curves."""
        first = round(n * self.weights[0])
        pairs = enumerate(zip(self.maps, (first, n - first), strict=False))
        parts = [m.draw(k, seed + i) for i, (m, k) in pairs if k]
        return Curves(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def average_models(
    p: FitProblem, points: Series, start: Point, prior_correlated: float
) -> ModelAverage:
    """Fit the noise models of a problem (its whitener is replaced) and weigh them.

    `start` is the least-squares solution; `prior_correlated` 0 assumes independent evaluations.
    """
    priors = {0.0: 1 - prior_correlated, SHARE: prior_correlated}
    shares = [share for share, prior in priors.items() if prior > 0]
    maps, log_w = [], []
    for share in shares:
        k = covariance(points.compute, share, points.stderr)
        whitened = replace(p, white=whitener(k))
        maps.append(build_map(whitened, float(np.linalg.slogdet(k)[1]), start))
        log_w.append(maps[-1].log_evidence + float(np.log(priors[share])))
    w = np.exp(np.array(log_w) - max(log_w))
    weights = tuple(float(t) for t in w / w.sum())
    return ModelAverage(tuple(maps), weights, weights[-1] if shares[-1] > 0 else 0.0)


def _average(ends: list[Array], weights: tuple[float, ...], tail: float) -> Array:
    """Return the value y [m] at which the lower tails of the models reach `tail`, averaged.

    `ends` are each model's lower interval ends on the ladder [levels, m], rising with level.
    """
    z = ndtri(TAILS)
    lo = np.min([e[0] for e in ends], axis=0)
    hi = np.max([e[-1] for e in ends], axis=0)
    for _ in range(40):
        y = 0.5 * (lo + hi)
        total = sum(w * _tail(y, e, z) for w, e in zip(weights, ends, strict=True))
        below = np.asarray(total) < tail
        lo, hi = np.where(below, y, lo), np.where(below, hi, y)
    return np.asarray(hi)


def _tail(y: Array, ends: Array, z: Array) -> Array:
    """Return the tail probability at y [m], linear in normal score between ends [levels, m]."""
    k = (ends <= y).sum(axis=0)
    i = np.clip(k, 1, len(z) - 1)
    columns = np.arange(ends.shape[1])
    left, right = ends[i - 1, columns], ends[i, columns]
    share = np.divide(y - left, right - left, out=np.zeros_like(y), where=right > left)
    p = ndtr(z[i - 1] + np.clip(share, 0, 1) * (z[i] - z[i - 1]))
    return np.where(k == 0, 0.0, np.where(k == len(z), 0.5, p))
