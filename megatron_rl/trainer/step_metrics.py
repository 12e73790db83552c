"""Token statistics of one step, as sums that add up over micro-batches and ranks.

Means are over the trained tokens (loss weight > 0: sampled completion tokens of used sequences).
Shape legend: T completion tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithm.objective import Sums
from megatron_rl.trainer.router_replay import COUNTS

TOKEN_SUMS = (
    *("loss", "tokens", "ratio", "ratio_squared", "clipped", "outside", "kl", "entropy"),
    *("same_error", "same_tokens", "corrected", "reference_kl"),
)
SUMS = (*TOKEN_SUMS, *COUNTS)
NEAR_ONE = (0.9, 1.1)
"""Ratios outside of this are counted as `ratio_outside_0.9_1.1`."""


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """The completion tokens that this rank answers for, all [T]."""

    logprobs: Tensor
    entropy: Tensor
    generator_logprobs: Tensor
    loss_weights: Tensor
    same_version: Tensor
    """bool: sampled under the weights that were just differentiated, like all its sequence."""


def local_sums(tokens: TokenArrays, objective: Sequence[Sums]) -> tuple[Tensor, Tensor]:
    """(sums in the order of `TOKEN_SUMS`, maxima [ratio, same-version error]) of this rank, fp64.

    Args:
        tokens: of all micro-batches.
        objective: what the objective summed up in each micro-batch.
    """
    trained = tokens.loss_weights > 0
    difference = (tokens.logprobs - tokens.generator_logprobs).double()
    log_ratio = difference[trained]
    ratio = log_ratio.exp()
    outside = (ratio < NEAR_ONE[0]) | (ratio > NEAR_ONE[1])
    same_error = difference[tokens.same_version].abs()
    loss, clipped, corrected, reference_kl = (
        sum(float(getattr(part, name)) for part in objective)
        for name in ("loss", "clipped", "corrected", "reference_kl")
    )
    sums = [
        loss,
        len(ratio),
        ratio.sum(),
        ratio.square().sum(),
        clipped,
        outside.sum(),
        # k3 of KL(gen || train): E_gen[rho - 1 - log rho], never negative.
        (ratio - 1 - log_ratio).sum(),
        tokens.entropy[trained].double().sum(),
        same_error.sum(),
        len(same_error),
        corrected,
        reference_kl,
    ]
    maxima = [x.max() if len(x) else 0.0 for x in (ratio, same_error)]
    return (
        torch.tensor([float(x) for x in sums], dtype=torch.float64),
        torch.tensor([float(x) for x in maxima], dtype=torch.float64),
    )


def reduce_sums(sums: Tensor, maxima: Tensor, probe: Tensor, group: dist.ProcessGroup) -> None:
    """Adds up sums and probe log-probs, and takes the maxima, over `group`, in place."""
    flat = torch.cat([sums, probe])
    dist.all_reduce(flat, group=group)
    sums.copy_(flat[: len(sums)])
    probe.copy_(flat[len(sums) :])
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)


def named(sums: Tensor, maxima: Tensor) -> dict[str, float]:
    """The metrics of a step by their names in metrics.jsonl, from the sums of the whole world."""
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    ratio_max, same_max = maxima.tolist()
    n, same = max(total["tokens"], 1.0), max(total["same_tokens"], 1.0)
    mean = total["ratio"] / n
    return {
        "loss": total["loss"],
        "ratio_mean": mean,
        "ratio_max": ratio_max,
        "ratio_std": max(total["ratio_squared"] / n - mean**2, 0.0) ** 0.5,
        "clipped_fraction": total["clipped"] / n,
        "corrected_fraction": total["corrected"] / n,
        "kl_reference": total["reference_kl"] / n,
        "ratio_outside_0.9_1.1": total["outside"] / n,
        "mismatch_kl": total["kl"] / n,
        "entropy": total["entropy"] / n,
        "tokens_trained": total["tokens"],
        "same_version_logprob_error_max": same_max,
        "same_version_logprob_error_mean": total["same_error"] / same,
        "same_version_logprob_tokens": total["same_tokens"],
    }


def named_routes(sums: Tensor) -> dict[str, float]:
    """How far the trainer's routers are from the generator's, from the sums of the whole world."""
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    known = max(total["routes"], 1.0)
    return {
        "routes_differing_fraction": total["routes_differing"] / known,
        "routes_differing_live_fraction": total["routes_differing_live"] / known,
    }
