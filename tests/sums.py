"""The yardstick of sums: their absolute terms."""

from __future__ import annotations

from torch import Tensor


def sum_error(got: Tensor, want: Tensor, absolute_terms: Tensor) -> float:
    """Return |got - want| / |absolute terms| in Euclidean norms, in float64.

    Rounding moves each term and each partial sum in proportion to its own size (2^-24 in fp32).
    Where terms of both signs cancel, these errors stay, and how they add up depends on the order of
    the sum, which differs from processor to processor. So a bound is one of the absolute terms.

    Args:
        got: a sum, or a matrix of sums.
        want: the same in float64.
        absolute_terms: for each sum, the sum of the absolute values of its terms.
    """
    error = (got.detach().double() - want.double()).norm()
    return float(error / absolute_terms.double().norm()) if error else 0.0
